"""Models from the Hugging Face hub: from its local cache if present, else downloaded.

Only the files that a model needs are downloaded: JSON, safetensors or GGUF, templates and tokenizer files. The hub
client's own settings apply (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE).
"""

import re
from glob import escape
from pathlib import Path

from kvasir.errors import ModelFileError
from kvasir.weights.gguf_split import split_names
from kvasir.weights.local import ModelFiles, find_local, group_gguf

_SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".txt")
_TEMPLATES = "additional_chat_templates/"
_WEIGHTS = ("model", "colbert_linear.", "sparse_linear.")  # and the layers over tokens of BGE-M3
# What the modules of sentence-transformers read, in folders of their own: 1_Pooling, 2_Dense, ...
_MODULES = re.compile(r"\d+_[A-Za-z]+/(config\.json|model\.safetensors)")


def find_on_hub(ref: str, revision: str | None, allow_download: bool) -> ModelFiles:
    """The model `org/name` or `org/name:tag`. Raises `ModelFileError` if it is unavailable."""
    repository, _, tag = ref.partition(":")
    try:
        return _locate(_cached(repository, revision), repository, tag)
    except ModelFileError as error:
        if not allow_download:
            raise ModelFileError(
                f"{ref}: incomplete in the local cache, and downloads are disabled: {error.message}",
                "download the model first, or allow downloads",
            ) from error
    return _locate(_download(repository, revision, tag), repository, tag)


def choose_files(names: list[str], tag: str, repository: str) -> list[str]:
    """The files to download from a repository. Raises `ModelFileError` if it has no supported weights."""
    if not tag and any(name.endswith(".safetensors") for name in names):
        return _choose_hf(names)
    if any(name.endswith(".gguf") for name in names):
        return choose_gguf(names, tag, repository)
    raise ModelFileError(
        f"{repository}: the repository has neither safetensors nor GGUF files",
        "pickled weights are never read; look for a converted copy of the model",
    )


def choose_gguf(names: list[str], tag: str, repository: str) -> list[str]:
    """The files of one GGUF model of a repository, selected by file name or by format ("Q4_K_M").

    Raises `ModelFileError` that lists the choices if none or several match.
    """
    models = group_gguf([name for name in names if name.endswith(".gguf")])
    fitting = [model for model in models if not tag or any(_fits(name, tag) for name in model)]
    if len(fitting) != 1:
        listed = ", ".join(model[0] for model in (fitting or models)) or "none"
        problem = "several GGUF models match" if fitting else "no GGUF model matches"
        raise ModelFileError(f"{repository}: {problem} {tag!r}: {listed}", f"name one, for example {repository}:Q4_K_M")
    return split_names(fitting[0][0])


def _fits(name: str, tag: str) -> bool:
    if tag.endswith(".gguf"):
        return tag in (name, name.rpartition("/")[2])
        # A format must match a whole word of the name, so that Q4_K does not match Q4_K_M, nor F16 BF16.
    word = rf"(?<![a-z0-9_]){re.escape(tag.lower())}(?![a-z0-9_])"
    return re.search(word, name.lower().removesuffix(".gguf")) is not None


def _choose_hf(names: list[str]) -> list[str]:
    """Files of the top folder, of the templates' folder and of modules only: no pickles, no code, no duplicates of the
    weights."""
    wanted = [name for name in names if name.endswith(_SUFFIXES) and ("/" not in name or name.startswith(_TEMPLATES))]
    if any(name.startswith("model") and name.endswith(".safetensors") for name in wanted):
        # Some repositories also hold the same weights in files for another library.
        wanted = [name for name in wanted if name.startswith(_WEIGHTS) or not name.endswith(".safetensors")]
    modules = "modules.json" in wanted
    return [*wanted, *(name for name in names if modules and _MODULES.fullmatch(name))]


def _locate(folder: Path, repository: str, tag: str) -> ModelFiles:
    """The model in a snapshot folder, which may hold only some of the repository's files."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
    if not tag and (not names or (folder / "config.json").is_file()):
        return find_local(folder)
    return find_local(folder / choose_gguf(names, tag, repository)[0])


def _cached(repository: str, revision: str | None) -> Path:
    """The snapshot folder in the cache, complete or not; sends no requests."""
    return _snapshot(repository, revision, [], local_files_only=True)


def _download(repository: str, revision: str | None, tag: str) -> Path:
    from huggingface_hub import HfApi

    try:
        siblings = HfApi().model_info(repository, revision=revision).siblings or []
    except Exception as error:  # the client raises many types, including its HTTP library's
        raise _unreachable(repository, error) from error
    chosen = choose_files([file.rfilename for file in siblings], tag, repository)
    return _snapshot(repository, revision, [escape(name) for name in chosen])


def _snapshot(repository: str, revision: str | None, patterns: list[str], local_files_only: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            repository, revision=revision, allow_patterns=patterns, local_files_only=local_files_only
        )
    except Exception as error:
        raise _unreachable(repository, error) from error
    return Path(str(folder))


def _unreachable(repository: str, error: Exception) -> ModelFileError:
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ModelFileError(
        f"{repository}: cannot be downloaded from the hub: {first_line}",
        "check the name, the network, and HF_TOKEN for gated models",
    )
