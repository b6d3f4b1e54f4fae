"""Loads the text half's parts of a model: its tokenizer and its chat templates. No torch."""

from __future__ import annotations

from pathlib import Path

from kvasir.adapters import AdapterOption, is_folder_name
from kvasir.config import EngineOptions
from kvasir.errors import ConfigError
from kvasir.json_file import read_json_object
from kvasir.text.chat import ChatTemplate
from kvasir.text.prompts import Prompts, read_prompts
from kvasir.text.tokenizer import Tokenizer
from kvasir.weights.find import find_model
from kvasir.weights.gguf import GGUFFile
from kvasir.weights.local import ModelFiles, gguf_chat_templates

MAX_TASKS = 64
NO_TOKENIZER = (None, "none", "no_vocab")  # values of llama.cpp's `tokenizer.ggml.model`


def load_text(options: EngineOptions) -> tuple[Tokenizer | None, ChatTemplate]:
    """The tokenizer (None for a model without one: prompts are ids then) and the chat template of a model.

    Raises KvasirError if files are missing or malformed.
    """
    files = find_model(options.tokenizer or options.model, options.revision)
    tokenizer, templates = _from_gguf(files) if files.kind == "gguf" else _from_folder(files)
    if options.chat_template:
        templates = {"default": _read_template(options.chat_template)}
    return tokenizer, ChatTemplate(templates, tokenizer.special_tokens if tokenizer else None)


def load_prompts(options: EngineOptions) -> Prompts:
    """The prompts of an embedding model. Raises KvasirError if files are missing or malformed."""
    files = find_model(options.tokenizer or options.model, options.revision)
    return Prompts() if files.kind == "gguf" else read_prompts(files.root)


def load_tasks(options: EngineOptions) -> tuple[AdapterOption, ...]:
    """The adapters for tasks in the model's own checkpoint, as Jina embeddings v3 has them."""
    files = find_model(options.model, options.revision)
    names = read_json_object(files.config).get("lora_adaptations") if files.kind == "hf" and files.config else None
    if not isinstance(names, list) or len(names) > MAX_TASKS:
        return ()
    return tuple(AdapterOption(name, f"{files.root}#{name}", own=True) for name in names if is_folder_name(name))


def _from_folder(files: ModelFiles) -> tuple[Tokenizer | None, dict[str, str]]:
    has_one = files.tokenizer_json or files.tokenizer_model
    return Tokenizer.from_folder(files.root) if has_one else None, dict(files.chat_templates)


def _from_gguf(files: ModelFiles) -> tuple[Tokenizer | None, dict[str, str]]:
    with GGUFFile(files.weights[0]) as file:
        kind = file.metadata.get("tokenizer.ggml.model")
        tokenizer = Tokenizer.from_gguf(file.metadata) if kind not in NO_TOKENIZER else None
        return tokenizer, {**gguf_chat_templates(file.metadata), **files.chat_templates}


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"the chat template {path} cannot be read: {reason}", "give a text file") from error
