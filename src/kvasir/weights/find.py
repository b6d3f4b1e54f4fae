"""Resolves a user's model reference to files: a folder, a GGUF file, a bundled model or a hub repository.

    /models/qwen3            a folder with config.json and safetensors, or with one GGUF model
    /models/qwen3-Q4_K.gguf  a GGUF file (any part of a split one)
    mini, kvasir-mini        the small model that comes with the package
    org/name                 a repository on the Hugging Face hub: from its local cache, else downloaded
    org/name:Q4_K_M          one GGUF model of a repository, by its format's name or by its file's
    hf.co/org/name           the same repository; also huggingface.co/org/name, and with https:// before it

Existing paths take precedence over the hub. Pickled weights (.bin, .pt) and code are never downloaded or read.
"""

from pathlib import Path

from kvasir.environment import user_path
from kvasir.errors import ModelFileError
from kvasir.weights.local import ModelFiles, find_local

BUNDLED = {"mini": "kvasir-mini", "kvasir-mini": "kvasir-mini"}
_HUBS = ("https://", "hf.co/", "huggingface.co/")  # what may stand before org/name, in this order
ASSETS = Path(__file__).parents[1] / "assets"


def find_model(ref: str | Path, revision: str | None = None, allow_download: bool | None = None) -> ModelFiles:
    """The files of the model that `ref` names; the module docstring lists the forms of `ref`.

    revision: a branch, tag or commit of a hub repository. allow_download: False never uses the network; None and True
    do, unless huggingface_hub is set to offline mode (HF_HUB_OFFLINE).

    Raises `ModelFileError` with what was looked for, where, and what was found instead.
    """
    text = str(ref)
    if text in BUNDLED:
        return _bundled(BUNDLED[text])
    try:
        path = user_path(text)
        exists = bool(text) and path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelFileError(f"{text[:200]!r} is not a path: {error}") from error
    if exists:
        return _model(find_local(path))
    hub_id = None if isinstance(ref, Path) else _hub_id(text)
    if hub_id is None:
        raise ModelFileError(
            f"{text}: there is no such file or folder",
            "give a model folder, a .gguf file, or a hub repository as org/name",
        )
    # Imported on demand: most starts need neither the hub client nor the network.
    from kvasir.weights.hub import find_on_hub

    return _model(find_on_hub(hub_id, revision, allow_download is not False))


def _model(files: ModelFiles) -> ModelFiles:
    """Raises ModelFileError for an adapter."""
    if files.kind == "adapter":
        hint = f"name its base model, with --lora NAME={files.root}"
        raise ModelFileError(f"{files.root}: this is an adapter, not a model", hint)
    return files


def _bundled(name: str) -> ModelFiles:
    if not (ASSETS / name).is_dir():
        raise ModelFileError(f"the bundled model {name} is missing at {ASSETS / name}", "reinstall the package")
    return find_local(ASSETS / name)


def _hub_id(text: str) -> str | None:
    """`org/name`, optionally with `:tag`, of a text that names a repository and does not look like a path."""
    for prefix in _HUBS:
        text = text.removeprefix(prefix)
    repository = text.partition(":")[0]
    parts = repository.split("/")
    plain = all(part and part[0] not in ".~" and "\\" not in part for part in parts)
    return text if len(parts) == 2 and plain and not repository.endswith(".gguf") else None
