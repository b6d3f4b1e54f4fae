"""The files of a model on disk: in a Hugging Face folder, or GGUF files."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvasir.errors import ModelFileError
from kvasir.json_file import read_json_object, read_text
from kvasir.weights.gguf_split import split_names, split_paths
from kvasir.weights.safetensors import weight_files

ADAPTER_CONFIG = "adapter_config.json"
DEFAULT_TEMPLATE = "default"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The paths of a model's files, or of an adapter's in peft's or mlx-lm's form; None for a missing file.

    weights: all shards or parts, in order. chat_templates: template texts by name, the default one as "default". A GGUF
    file contains its own config, tokenizer and templates; the entries here are then files beside it in its folder (see
    `gguf_chat_templates` for the templates inside).
    """

    kind: Literal["hf", "gguf", "adapter"]
    root: Path
    weights: tuple[Path, ...]
    config: Path | None = None
    generation_config: Path | None = None
    tokenizer_json: Path | None = None
    tokenizer_config: Path | None = None
    tokenizer_model: Path | None = None
    chat_templates: Mapping[str, str] = field(default_factory=dict)

    @property
    def chat_template(self) -> str | None:
        """The text of the default template."""
        return self.chat_templates.get(DEFAULT_TEMPLATE)


def find_local(path: Path) -> ModelFiles:
    """The model in a folder or GGUF file on disk. Raises `ModelFileError` if there is none, or several."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelFileError(
                f"{path}: expected a .gguf file or a model folder", "name the folder that holds config.json"
            )
        return ModelFiles("gguf", path.parent, tuple(split_paths(path)))
    models = group_gguf([file.name for file in path.glob("*.gguf")])
    if (path / "config.json").is_file() and (not models or any(path.glob("*.safetensors"))):
        return ModelFiles("hf", path, tuple(_safetensors(path)), **_companions(path))
    if (path / ADAPTER_CONFIG).is_file() and not models:
        return ModelFiles(
            "adapter", path, tuple(_safetensors(path, weight_files=_all_safetensors)), path / ADAPTER_CONFIG
        )
    if len(models) == 1:
        return ModelFiles("gguf", path, tuple(split_paths(path / models[0][0])), **_companions(path))
    if models:
        names = ", ".join(model[0] for model in models)
        raise ModelFileError(f"{path}: the folder holds several GGUF models: {names}", "name one of the files")
    found = ", ".join(sorted(file.name for file in path.iterdir())[:10]) or "nothing"
    raise ModelFileError(f"{path}: expected config.json with safetensors, or a .gguf file, found {found}")


def group_gguf(names: list[str]) -> list[list[str]]:
    """Groups GGUF file names by model, with the parts of a split model together. Vision projectors (mmproj) are left
    out, because they belong to another file."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        if "mmproj" not in Path(name).name.lower():
            groups.setdefault(split_names(name)[0], []).append(name)
    return list(groups.values())


_PAIR_TEMPLATE = "rerank"
# Templates that llama.cpp knows by a name.
_KNOWN_TEMPLATES = {
    "rwkv-world": """
{{- bos_token }}
{%- for message in messages %}
{{- {"system": "System", "user": "User", "assistant": "Assistant"}[message.role] + ": " }}
{{- message.content | trim + "\\n\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "Assistant:" }}{% endif %}
""".strip()
}


def gguf_chat_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    """The chat templates in a GGUF file's metadata, by name, the default one as "default"."""
    prefix = "tokenizer.chat_template"
    named = {key.removeprefix(prefix + "."): text for key, text in metadata.items() if key.startswith(prefix + ".")}
    templates = {DEFAULT_TEMPLATE: metadata.get(prefix), **named}
    found = {name: _KNOWN_TEMPLATES.get(text, text) for name, text in templates.items() if isinstance(text, str)}
    return found | {name: _pair_template(found[name]) for name in found if name == _PAIR_TEMPLATE}


def _pair_template(text: str) -> str:
    """In Jinja, a template that llama.cpp fills in for two texts: with {query} and {document} in it."""
    if any(mark in text for mark in ("{{", "{%")) or not all(mark in text for mark in ("{query}", "{document}")):
        return text
    places = {"query": "messages[-2]['content']", "document": "messages[-1]['content']"}
    refused = "this model's template has no place for an instruction"
    source = f"{{% if messages | length > 2 %}}{{{{ raise_exception({refused!r}) }}}}{{% endif %}}"
    for i, part in enumerate(re.split(r"\{(query|document)\}", text)):
        source += f"{{{{ {places[part] if i % 2 else repr(part)} }}}}"
    return source


def _all_safetensors(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ModelFileError(f"{folder}: the adapter has no .safetensors file", "download it again")
    return found


def _safetensors(folder: Path, weight_files: Callable[[Path], list[Path]] = weight_files) -> list[Path]:
    pickled = [file.name for pattern in _PICKLED for file in folder.glob(pattern)]
    if pickled and not any(folder.glob("*.safetensors")):
        raise ModelFileError(
            f"{folder}: the weights are pickled ({pickled[0]}), which can run code and is never read",
            "convert them to safetensors",
        )
    return weight_files(folder)


def _companions(folder: Path) -> dict[str, Any]:
    """The files beside the weights, as keyword arguments of `ModelFiles`."""
    names = {
        "config": "config.json",
        "generation_config": "generation_config.json",
        "tokenizer_json": "tokenizer.json",
        "tokenizer_config": "tokenizer_config.json",
        "tokenizer_model": "tokenizer.model",
    }
    paths = {key: folder / name if (folder / name).is_file() else None for key, name in names.items()}
    if paths["tokenizer_model"] is None:  # RWKV's vocabulary, a text file
        paths["tokenizer_model"] = next(iter(sorted(folder.glob("rwkv_vocab_v*.txt"))), None)
    return {**paths, "chat_templates": _chat_templates(folder, paths["tokenizer_config"])}


def _chat_templates(folder: Path, tokenizer_config: Path | None) -> dict[str, str]:
    """Templates by name, from all sources. A .jinja file takes precedence over chat_template.json, which takes
    precedence over the tokenizer's config."""
    templates: dict[str, str] = {}
    for path in (tokenizer_config, folder / "chat_template.json"):
        if path is not None and path.is_file():
            templates |= _templates_in(read_json_object(path).get("chat_template"), path)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_text(path)
    if (folder / "chat_template.jinja").is_file():
        templates[DEFAULT_TEMPLATE] = read_text(folder / "chat_template.jinja")
    return templates


def _templates_in(value: Any, path: Path) -> dict[str, str]:
    """Templates by name, from a template's text or a list of {"name": ..., "template": ...}."""
    entries = [{"name": DEFAULT_TEMPLATE, "template": value}] if isinstance(value, str) else value or []
    try:
        templates = {entry["name"]: entry["template"] for entry in entries}
    except (TypeError, KeyError):
        templates = {"": None}
    if not all(isinstance(part, str) for pair in templates.items() for part in pair):
        raise ModelFileError(f"{path}: 'chat_template' is neither a text nor a list of named texts")
    return templates
