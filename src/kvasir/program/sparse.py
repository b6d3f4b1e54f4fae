"""The C structures of sparse attention (csrc/indexer.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_float, c_int32, c_int64, c_void_p
from typing import Any

from kvasir.ops import native
from kvasir.ops.attention.native import AttentionArgs
from kvasir.ops.graph import CannotTrace
from kvasir.program.cache import NativeCache

MAX_INDEX_DIM, MAX_INDEX_HEADS, MAX_TOP_K = 256, 1024, 1 << 16


class IndexArgs(ctypes.Structure):
    """The operands of an indexer."""

    _fields_ = (
        *((name, c_int32) for name in ("heads", "dim", "top_k", "block_size", "group")),
        ("scale", c_float),
        *((name, c_void_p) for name in ("blocks", "q", "weights", "k", "out", "pieces")),
        ("num_pieces", c_int64),
        ("scratch", c_void_p),
        ("max_tokens", c_int64),
    )


class SelectedArgs(ctypes.Structure):
    """The operands of attention to selected positions."""

    _fields_ = (("attention", AttentionArgs), ("selected", c_void_p), ("top_k", c_int64))


def index_scratch(max_tokens: int) -> int:
    """Bytes of scratch memory per thread: the scores of a row."""
    return (max_tokens + 63) // 16 * 16 * 4


def selected_scratch(args: SelectedArgs) -> int:
    """Bytes of scratch memory per thread."""
    call = native.declare("kvasir_selected_scratch", c_int64, c_void_p, c_int32, c_int64)
    return call(byref(args.attention.layout), args.attention.heads, args.top_k)


def index_args(cache: NativeCache, inputs: Sequence[Any], rows: Sequence[int], max_tokens: int) -> IndexArgs:
    """inputs: of the op. rows: the addresses of its result, queries, weights and keys. max_tokens: of a sequence.
    Raises CannotTrace for sizes that the kernels do not support."""
    (heads, dim), layer, scale, top_k = inputs[0].shape, inputs[3].layer, *inputs[5:]
    if dim > MAX_INDEX_DIM or heads > MAX_INDEX_HEADS or top_k > MAX_TOP_K:
        raise CannotTrace(f"no kernel for an indexer of {heads} heads of {dim} that selects {top_k}")
    array, (out, q, weights, k) = cache.arrays(layer)[0][0], rows
    assert array.shape[1] == cache.block_size * dim
    return IndexArgs(
        heads, dim, top_k, cache.block_size, cache.group_of(layer), scale, array.ctypes.data, q, weights, k, out,
        max_tokens=max_tokens,
    )  # fmt: skip


def selected_args(cache: NativeCache, inputs: Sequence[Any], rows: Sequence[int]) -> SelectedArgs:
    """inputs: of the op. rows: the addresses of its result, queries and selected positions."""
    q, selected, layer, scale, value_dim = inputs[0], inputs[1], inputs[2].layer, *inputs[6:]
    out, q_rows, positions = rows
    attention = AttentionArgs(
        cache.layout_at(layer), cache.address(layer, False), cache.address(layer, True), q_rows, out, q.width,
        q.shape[0] * value_dim, q.shape[0], 0, scale,
    )  # fmt: skip
    attention.group = cache.group_of(layer)
    return SelectedArgs(attention, positions, selected.width)
