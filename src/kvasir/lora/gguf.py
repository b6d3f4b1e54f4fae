"""Adapters in llama.cpp's form: a GGUF file (convert_lora_to_gguf.py, src/llama-adapter.cpp).

    blk.0.attn_q.weight.lora_a [r, in], .lora_b [out, r], in the order of rows that files of this architecture have
    blk.0.ffn_up_exps.weight.lora_a [E, r, in], .lora_b [E, out, r]
    token_embd.weight.lora_a [V, r], .lora_b [H, r]

The scale is adapter.lora.alpha / r, or 1 if alpha is 0. The format has neither rank patterns nor DoRA.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.lora.adapter import AdapterFile, Update, check_dtype, check_scale, content_hash, pair_rank, stack_rank
from kvasir.weights.gguf_split import open_gguf
from kvasir.weights.source import GGUFSource

TABLE = "token_embd.weight"
MAX_INVOCATION = 4096
_ALPHA, _INVOCATION = "adapter.lora.alpha", "adapter.alora.invocation_tokens"
_BASE = {"name": "general.base_model.0.name", "architecture": "general.architecture"}
# Keys that begin with "adapter." change the arithmetic.
_KNOWN = ("adapter.type", _ALPHA, _INVOCATION, "adapter.lora.task_name", "adapter.lora.prompt_prefix")


def read_gguf(path: Path) -> AdapterFile:
    """Reads an adapter's file. Its modules have the file's names; `bind` translates them. Raises ModelFileError for
    what is damaged or does not fit together, UnsupportedModel for what has no code."""
    source = GGUFSource(open_gguf(path))
    metadata = source.model.metadata
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        value = metadata.get(key)
        if not isinstance(value, str) or value != expected:
            raise ModelFileError(f"{path}: {key} is {quoted(value)}, expected {expected!r}")
    if unknown := sorted(key for key in metadata if key.startswith("adapter.") and key not in _KNOWN):
        raise UnsupportedModel(f"{path}: {quoted(unknown[0])} is set, which is not supported")
    alpha = metadata.get(_ALPHA, 0.0)
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise ModelFileError(f"{path}: {_ALPHA} is {quoted(alpha)}, expected a number")
    invocation = _invocation(path, metadata.get(_INVOCATION))
    arrays: dict[str, np.ndarray] = {}
    for name in source.names():
        check_dtype(name, source.info(name).dtype)
        arrays[name] = source.array(name)
    updates = _updates(path, arrays, float(alpha))
    base = {name: str(metadata[key]) for name, key in _BASE.items() if isinstance(metadata.get(key), str)}
    if "architecture" not in base:
        raise ModelFileError(f"{path}: general.architecture is missing, expected that of the base model")
    content, nbytes = content_hash(["gguf", base["architecture"], float(alpha), invocation], arrays.items())
    return AdapterFile("gguf", path, content, base, updates, invocation=invocation, nbytes=nbytes)


def _invocation(path: Path, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    fits = isinstance(value, np.ndarray) and value.dtype.kind in "iu" and 0 < len(value) <= MAX_INVOCATION
    ids = tuple(map(int, value)) if fits else ()
    if not ids or not all(0 <= one < 2**31 for one in ids):
        raise ModelFileError(f"{path}: {_INVOCATION} is {quoted(value)}, expected 1 to {MAX_INVOCATION} token ids")
    return ids


def _updates(path: Path, arrays: Mapping[str, np.ndarray], alpha: float) -> tuple[Update, ...]:
    pairs: dict[str, dict[str, np.ndarray]] = {}
    for name, array in arrays.items():
        module, _, kind = name.rpartition(".")
        if kind not in ("lora_a", "lora_b"):
            raise UnsupportedModel(f"{path}: the adapter has the unknown tensor {quoted(name)}")
        pairs.setdefault(module, {})[kind] = array
    if not pairs:
        raise ModelFileError(f"{path}: there is no tensor of an adapter", "convert the adapter again")
    return tuple(_update(name, pair, alpha) for name, pair in pairs.items())


def _update(name: str, pair: Mapping[str, np.ndarray], alpha: float) -> Update:
    if missing := {"lora_a", "lora_b"} - pair.keys():
        raise ModelFileError(f"the adapter has no tensor {quoted(f'{name}.{missing.pop()}')}")
    a, b = pair["lora_a"], pair["lora_b"]
    if a.ndim == 3:
        rank = stack_rank(name, a, b)
        return Update(name, a, b, rank, _scale(name, alpha, rank), experts=len(a), stacked=True)
    table = name == TABLE
    a = a.T if table else a
    rank = pair_rank(name, a, b)
    return Update(name, a, b, rank, _scale(name, alpha, rank), embedding=table)


def _scale(name: str, alpha: float, rank: int) -> float:
    return check_scale(f"the adapter's scale of {quoted(name)}", alpha / rank if alpha else 1.0)
