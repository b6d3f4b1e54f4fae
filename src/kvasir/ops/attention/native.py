"""The structures of csrc/attention.h, and the native paged cache and attention on arrays, for tests.

A model's program fills the structures and calls the kernels itself. The cache is opaque bytes here: the kernels define
its tile layout (csrc/attention_layout.h), which differs from the torch body's [blocks, block size, K, d].
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from kvasir.ops import native
from kvasir.ops.attention.relative import Relative
from kvasir.ops.attention.sizes import first_in_window
from kvasir.plan import Work

PIECE_SAMPLE, PIECE_BIDIRECTIONAL, PIECE_LOGITS = 1, 2, 4
FORMATS = ("float32", "bfloat16", "float16", "int8")  # in the order of CacheFormat
MAX_HEAD_DIM = 576
_MAX = (1 << 31) - 1


class CacheLayoutStruct(Structure):
    _fields_ = (
        ("format", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("value_dim", c_int32),
        ("latent", c_int32),
    )


class Piece(Structure):
    """One sequence's part of a step (csrc/piece.h): the kernels' view of a plan's Work. The program's gather fills in
    first, tables and reached."""

    _fields_ = (
        ("row", c_int32),
        ("flags", c_int32),
        ("start", c_int64),
        ("count", c_int64),
        ("drafted", c_int64),
        ("first", c_int64),
        ("tables", c_void_p),
        ("reached", c_int64),
    )


class StoreArgs(Structure):
    _fields_ = (
        ("layout", CacheLayoutStruct),
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_rows", c_void_p),
        ("v_rows", c_void_p),
        ("k_stride", c_int64),
        ("v_stride", c_int64),
        ("slots", c_void_p),
        ("rows", c_int64),
    )


class RelativeStruct(Structure):
    _fields_ = (
        ("bias", c_void_p),
        ("keys", c_void_p),
        ("queries", c_void_p),
        ("k_rows", c_void_p),
        ("k_stride", c_int64),
        ("reach", c_int64),
    )

    @classmethod
    def of(cls, tables: Relative, k_rows: int | None, k_stride: int) -> RelativeStruct:
        """tables must outlive it. k_rows: the address of the step's keys, row stride in floats."""
        found = (None if t is None else t.ctypes.data for t in (tables.bias, tables.keys, tables.queries))
        return cls(*found, k_rows, k_stride, tables.reach)


class AttentionArgs(Structure):
    _fields_ = (
        ("layout", CacheLayoutStruct),
        ("k", c_void_p),
        ("v", c_void_p),
        ("q", c_void_p),
        ("out", c_void_p),
        ("q_stride", c_int64),
        ("out_stride", c_int64),
        ("heads", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("distance", c_int32),
        ("causal", c_int32),
        ("sinks", c_void_p),
        ("alibi_slopes", c_void_p),
        ("pieces", c_void_p),
        ("num_pieces", c_int64),
        ("group", c_int64),
        ("scratch", c_void_p),
        ("relative", c_void_p),
    )


@cache
def _call(name: str, result: Any, *arguments: Any) -> Any:
    return native.declare(name, result, *arguments)


def cache_block_bytes(layout: CacheLayoutStruct, values: bool) -> int:
    """Bytes of one block of one layer's keys or values. Negative if no kernel supports the layout."""
    return _call("kvasir_cache_block_bytes", c_int64, c_void_p, c_int32)(byref(layout), values)


def attention_scratch(layout: CacheLayoutStruct, heads: int) -> int:
    """Bytes of scratch memory per thread."""
    return _call("kvasir_attention_scratch", c_int64, c_void_p, c_int32)(byref(layout), heads)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a layer's cache is stored. format: one of FORMATS. head_dim: of keys, even, at most MAX_HEAD_DIM. block_size:
    a multiple of 16. value_dim: at most MAX_HEAD_DIM, 0 for that of keys. latent: whether a value is the beginning of
    its key."""

    format: str
    kv_heads: int
    head_dim: int
    block_size: int
    value_dim: int = 0
    latent: bool = False

    def block_bytes(self, values: bool = False) -> int:
        """Bytes of one block of one layer's keys or values. Raises ValueError if no kernel supports the layout."""
        size = cache_block_bytes(self._struct(), values)
        if size < 0:
            raise ValueError(f"the native kernels have no cache like {self}")
        return size

    def new_cache(self, blocks: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of one layer, uint8 [blocks, block bytes], with every number NaN (or with a NaN scale)."""
        k, v = (np.full((blocks, self.block_bytes(values)), 0xFF, np.uint8) for values in (False, True))
        return k, v

    @property
    def mixed_dim(self) -> int:
        """The dimensions of a head's output."""
        return self.value_dim or self.head_dim

    def _struct(self) -> CacheLayoutStruct:
        sizes = (self.kv_heads, self.head_dim, self.block_size)
        if self.format not in FORMATS or not all(0 < size <= _MAX for size in sizes) or not 0 <= self.value_dim <= _MAX:
            raise ValueError(f"the native kernels have no cache like {self}")
        return CacheLayoutStruct(FORMATS.index(self.format), *sizes, self.value_dim, self.latent)


def store_kv(layout: Layout, cache: Any, k_TKd: Any, v_TKe: Any, slots_T: Any) -> None:
    """Writes rows of keys, float32 [T, K, d], and values, [T, K, e], to their slots, rounded to the cache's format.

    Arguments are NumPy arrays or CPU tensors. v: the keys themselves if the layout is latent. slots: int64, block *
    block size + offset in the block. Raises ValueError for bad arrays or slots out of range.
    """
    rows = slots_T.shape[0]
    dims = layout.head_dim, layout.head_dim if layout.latent else layout.mixed_dim
    k, v = _halves(layout, cache)
    k_rows, v_rows = (
        native.address(array, name, (rows, layout.kv_heads, dim))
        for array, name, dim in zip((k_TKd, v_TKe), "kv", dims, strict=True)
    )
    slots = native.address(slots_T, "slots", (rows,), "int64")
    if rows and not 0 <= int(slots_T.min()) <= int(slots_T.max()) < len(cache[0]) * layout.block_size:
        raise ValueError(f"slots must be below {len(cache[0]) * layout.block_size}")
    args = StoreArgs(layout._struct(), k, v, k_rows, v_rows, *(layout.kv_heads * dim for dim in dims), slots, rows)
    _call("kvasir_store_kv", c_int32, c_void_p)(byref(args))


def attention(
    layout: Layout,
    cache: Any,
    q_THd: Any,
    works: Sequence[Work],
    starts: Sequence[int],
    tables: Sequence[np.ndarray],
    scale: float,
    *,
    window: int = 0,
    distance: int = 0,
    softcap: float = 0.0,
    sinks_H: Any = None,
    alibi_slopes_H: Any = None,
    relative: Relative | None = None,
    k_TKd: Any = None,
    threads: int = 1,
    out: Any = None,
) -> Any:
    """softmax(q k^T * scale) v of the works' rows, float32 [T, H, e], in `out` (default: a NumPy array of zeros), whose
    other rows stay unchanged.

    Arguments are NumPy arrays or CPU tensors. distance: of the keys before and after a row of an indivisible work, 0
    for all. relative, k: as in `paged_attention`. starts: the first token row of each work. tables: int32 block ids,
    indexed by a work's row. threads: the size of a thread team that exists for this call. Raises ValueError for
    inconsistent arguments.
    """
    rows, heads, _ = q_THd.shape
    out = np.zeros((rows, heads, layout.mixed_dim), np.float32) if out is None else out
    if heads == 0 or heads % layout.kv_heads or threads < 1 or abs(window) > _MAX or not 0 <= distance <= _MAX:
        raise ValueError(f"{heads} heads, {layout.kv_heads} KV heads, {threads} threads, window {window}")
    struct = layout._struct()
    k, v = _halves(layout, cache)
    used = [np.ascontiguousarray(tables[work.row], np.int32) for work in works]
    for work, first, table in zip(works, starts, used, strict=True):
        _check(layout, cache, work, first, table, rows, window)
    scratch = np.empty(threads * attention_scratch(struct, heads) + 64, np.uint8)
    addresses = (c_void_p * len(works))(*(table.ctypes.data for table in used))  # one group per work
    pieces = (Piece * len(works))()
    for i, (piece, work, first) in enumerate(zip(pieces, works, starts, strict=True)):
        piece.flags = PIECE_BIDIRECTIONAL * work.indivisible
        piece.start, piece.count, piece.first = work.start, work.count, first
        piece.tables = ctypes.addressof(addresses) + i * ctypes.sizeof(c_void_p)
    kv_shape = (rows, layout.kv_heads, layout.head_dim)
    k_rows = None if k_TKd is None else native.address(k_TKd, "k", kv_shape)
    tables_of = None if relative is None else RelativeStruct.of(relative, k_rows, layout.kv_heads * layout.head_dim)
    args = AttentionArgs(
        struct,
        k,
        v,
        native.address(q_THd, "q", (rows, heads, layout.head_dim)),
        native.address(out, "out", (rows, heads, layout.mixed_dim), writable=True),
        heads * layout.head_dim,
        heads * layout.mixed_dim,
        heads,
        window,
        scale,
        softcap,
        distance,
        0,
        None if sinks_H is None else native.address(sinks_H, "sinks", (heads,)),
        None if alibi_slopes_H is None else native.address(alibi_slopes_H, "alibi_slopes", (heads,)),
        ctypes.addressof(pieces),
        len(pieces),
        0,
        -(-scratch.ctypes.data // 64) * 64,
        None if tables_of is None else ctypes.addressof(tables_of),
    )
    if _call("kvasir_attention", c_int32, c_void_p, c_int32)(byref(args), threads) != 0:
        raise ValueError(f"invalid number of threads ({threads}) or relative positions")
    return out


def _halves(layout: Layout, cache: Any) -> tuple[int, int]:
    """The addresses of the keys and the values of a layer's cache."""
    k, v = (
        native.address(half, "cache", (len(cache[0]), layout.block_bytes(values)), "uint8", writable=True)
        for values, half in zip((False, True), cache, strict=True)
    )
    return k, v


def _check(layout: Layout, cache: Any, work: Work, first: int, table: np.ndarray, rows: int, window: int) -> None:
    """Raises ValueError if a work's rows or blocks do not exist; blocks entirely before the window may be stale."""
    if not (0 <= first <= rows - work.count and work.count >= 0 <= work.start and work.end <= _MAX):
        raise ValueError(f"a work on rows {first} to {first + work.count} of {rows}, from {work.start}")
    low = max(0, first_in_window(work.start, window)) // layout.block_size
    used = table[low : -(-work.end // layout.block_size)]
    if len(table) * layout.block_size < work.end or ((used < 0) | (used >= len(cache[0]))).any():
        raise ValueError(f"the table of a work to {work.end} names blocks out of range")
