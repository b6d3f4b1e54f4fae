"""Facts about a model, read only from the headers of its files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import numpy as np

from kvasir.json_file import read_json_object
from kvasir.store.entry import ADAPTER, Details
from kvasir.weights.gguf_split import open_gguf
from kvasir.weights.local import ModelFiles, gguf_chat_templates
from kvasir.weights.safetensors import SafetensorsFolder

# general.file_type of GGUF files, as llama.cpp numbers them.
_FILE_TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S"},
    **{12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K"},
    **{19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL"},
    **{26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16"},
}
_KV_BYTES = 2
_ENCODERS = re.compile(r"bert|roberta|xlm", re.IGNORECASE)
_MAX_FAMILY = 64  # characters
_SHOWN = 8  # elements of a long array
_MAX_SHOWN_CHARS = 4096


def read_details(files: ModelFiles) -> Details:
    """The facts in the files' headers. Raises ModelFileError."""
    if files.kind == "adapter":
        return _of_adapter(files)
    return _of_gguf(files) if files.kind == "gguf" else _of_folder(files)


def read_model_info(files: ModelFiles, verbose: bool = False) -> dict[str, Any]:
    """The facts under the names of GGUF's metadata, as Ollama shows them; with long arrays only if `verbose`. Raises
    ModelFileError."""
    if files.kind == "gguf":
        with open_gguf(files.weights[0]) as model:
            metadata = {key: _shown(value, verbose) for key, value in sorted(model.metadata.items())}
            return {**metadata, "general.parameter_count": sum(prod(t.shape) for t in model.tensors.values())}
    details = read_details(files)
    family = details.family
    if files.kind == "adapter":
        config = {f"config.{key}": _shown(value, verbose) for key, value in read_json_object(_config(files)).items()}
        return {"general.type": ADAPTER, "general.parameter_count": details.parameters, **config}
    return {
        "general.architecture": family,
        "general.parameter_count": details.parameters,
        f"{family}.context_length": details.context_length,
        f"{family}.embedding_length": details.embedding_length,
        **{f"config.{key}": _shown(value, verbose) for key, value in read_json_object(_config(files)).items()},
    }


def _of_gguf(files: ModelFiles) -> Details:
    with open_gguf(files.weights[0]) as model:
        entries = model.metadata
        parameters = sum(prod(tensor.shape) for tensor in model.tensors.values())
        sizes = [(tensor.ggml_type.name, tensor.nbytes) for tensor in model.tensors.values()]
        templates = {**gguf_chat_templates(entries), **files.chat_templates}
    family = str(entries.get("general.architecture", ""))[:_MAX_FAMILY]
    fields = {key.removeprefix(f"{family}."): value for key, value in entries.items() if key.startswith(f"{family}.")}
    kind = entries.get("general.file_type")
    heads, width = _whole(fields.get("attention.head_count")), _whole(fields.get("embedding_length"))
    key_heads = fields.get("attention.head_count_kv", heads)
    head = width // heads if heads else 0
    dims = sum(_whole(fields.get(f"attention.{name}_length"), head) for name in ("key", "value"))
    layers = _whole(fields.get("block_count"))
    if isinstance(key_heads, np.ndarray):  # one number per layer
        rows = _whole(int(key_heads.sum())) if key_heads.dtype.kind in "iu" else 0
    else:
        rows = layers * _whole(key_heads)
    return Details(
        family=family,
        parameters=parameters,
        parameter_size=count_text(parameters),
        quantization_level=_FILE_TYPES.get(kind) or _largest(sizes) if isinstance(kind, int) else _largest(sizes),
        context_length=_whole(fields.get("context_length")),
        embedding_length=width,
        kv_bytes_per_token=max(0, rows * dims * _KV_BYTES),
        template=templates.get("default"),
        capabilities=(ADAPTER,)
        if entries.get("general.type") == ADAPTER
        else _capabilities(family, templates.values()),
    )


def _of_folder(files: ModelFiles) -> Details:
    config = read_json_object(_config(files))
    text = config.get("text_config")
    text = {**config, **text} if isinstance(text, dict) else config
    with SafetensorsFolder(files.root) as folder:
        tensors = [folder.info(name) for name in folder.names()]
    parameters = sum(prod(tensor.shape) for tensor in tensors)
    quantized = config.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    family = str(text.get("model_type") or "")[:_MAX_FAMILY]
    width, heads = (_first(text, *names) for names in (("hidden_size", "n_embd"), ("num_attention_heads", "n_head")))
    head = _first(text, "head_dim") or (width // heads if heads else 0)
    rows = _first(text, "num_hidden_layers", "n_layer") * (_first(text, "num_key_value_heads") or heads)
    return Details(
        family=family,
        parameters=parameters,
        parameter_size=count_text(parameters),
        quantization_level=str(method or _largest((tensor.dtype, tensor.nbytes) for tensor in tensors))[:_MAX_FAMILY],
        context_length=_first(text, "max_position_embeddings", "n_positions"),
        embedding_length=width,
        kv_bytes_per_token=rows * 2 * head * _KV_BYTES,
        template=files.chat_template,
        capabilities=_capabilities(family, files.chat_templates.values()),
    )


def _of_adapter(files: ModelFiles) -> Details:
    config = read_json_object(_config(files))
    parameters, types = 0, []
    for path in files.weights:
        with SafetensorsFolder(path) as file:
            tensors = [file.info(name) for name in file.names()]
            parameters += sum(prod(tensor.shape) for tensor in tensors)
            types += [(tensor.dtype, tensor.nbytes) for tensor in tensors]
    return Details(
        family=str(config.get("peft_type") or config.get("fine_tune_type") or "")[:_MAX_FAMILY].lower(),
        parameters=parameters,
        parameter_size=count_text(parameters),
        quantization_level=_largest(types)[:_MAX_FAMILY],
        capabilities=(ADAPTER,),
    )


def _config(files: ModelFiles):
    assert files.config is not None, "a safetensors folder needs a config.json"
    return files.config


def _capabilities(family: str, templates: Iterable[str]) -> tuple[str, ...]:
    """Capabilities in Ollama's terms. A feature that the template does not mention counts as unsupported."""
    if _ENCODERS.search(family):
        return ("embedding",)
    text = "\n".join(templates)
    tools = ("tools",) if re.search(r"\btools\b", text) else ()
    thinking = ("thinking",) if re.search(r"enable_thinking|<think>|reasoning_content", text) else ()
    return ("completion", *tools, *thinking)


def _largest(sizes: Iterable[tuple[str, int]]) -> str:
    """The type with the most bytes."""
    sums: dict[str, int] = {}
    for kind, size in sizes:
        sums[kind] = sums.get(kind, 0) + size
    return max(sums, key=lambda kind: sums[kind], default="")


def _first(config: Mapping[str, Any], *names: str) -> int:
    return next((value for name in names if (value := _whole(config.get(name)))), 0)


def _whole(value: object, default: int = 0) -> int:
    """A positive integer in a plausible range, else the default."""
    return value if type(value) is int and 0 < value < 1 << 40 else default


def _shown(value: Any, verbose: bool) -> Any:
    """A value in JSON types. Long arrays are None unless `verbose`."""
    if isinstance(value, list | np.ndarray):
        if len(value) > _SHOWN and not verbose:
            return None
        return [_shown(item, verbose) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and value - value != 0:
        return str(value)
    if isinstance(value, str) and not verbose:
        return value[:_MAX_SHOWN_CHARS]
    if isinstance(value, dict):
        return {key: _shown(item, verbose) for key, item in value.items()}
    return value


def count_text(count: int) -> str:
    """751632384 -> "751.63M", as Ollama writes it."""
    for size, unit, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if count >= size:
            return f"{count / size:.{0 if count % size == 0 else digits}f}{unit}"
    return str(count)
