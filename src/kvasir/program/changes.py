"""Packing what an adapter changes: the matrices of csrc/low_rank.h in one piece of memory."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from kvasir.layers.adapters import Change, Slot
from kvasir.ops.linear.native import change_squares
from kvasir.ops.linear.packed import PackedMatrix, allocate, pack_rows, packed_bytes
from kvasir.program import native

_LINE = 64
_TYPES = {np.dtype(np.float16): "F16", np.dtype(ml_dtypes.bfloat16): "BF16"}  # others are stored as F32


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """An adapter for a program. table: LowRankStruct of each slot, which points into `kept`. rank: the greatest.
    nbytes: of everything that it keeps in memory."""

    table: Any
    kept: Sequence[Any]
    rank: int
    nbytes: int

    @property
    def address(self) -> int:
        return ctypes.addressof(self.table)


def pack(slots: Mapping[str, Slot], changes: Mapping[str, Change], squares: Mapping[str, np.ndarray]) -> PackedAdapter:
    """Packs this rank's part of an adapter. changes: of the whole model's matrices, by slot. squares: by slot with a
    magnitude, `squares_of` the whole rows. A and B keep 16-bit numbers if B's are still exact with the scale in them.
    Raises ValueError for shapes that do not fit."""
    parts = {name: slots[name].part(change) for name, change in changes.items()}
    arrays = {name: (part.a, _scaled(part.b, part.scale)) for name, part in parts.items()}
    segments = {name: (slots[name].segments, 1) for name in parts}
    sizes = [_size(array, s) for name in arrays for array, s in zip(arrays[name], segments[name], strict=True)]
    memory, at = allocate(max(_LINE, sum(sizes))), 0
    table = (native.LowRankStruct * len(slots))()
    kept: list[Any] = [memory]
    for entry, name in zip(table, slots, strict=True):
        if name not in parts:
            continue
        packed = []
        for array, s in zip(arrays[name], segments[name], strict=True):
            size = _size(array, s)
            packed.append(_packed(array, s, memory[at : at + size]))
            at += size
        entry.a, entry.b = (matrix.address for matrix in packed)
        vectors = _vectors(parts[name], squares.get(name))
        entry.bias, entry.factors = (None if vector is None else vector.ctypes.data for vector in vectors)
        kept += [*packed, *vectors]
    vectors_bytes = sum(array.nbytes for array in kept[1:] if isinstance(array, np.ndarray))
    rank = max((len(a) for a, _ in arrays.values()), default=0)
    return PackedAdapter(table, kept, rank, memory.nbytes + vectors_bytes + ctypes.sizeof(table))


def squares_of(slot: Slot, weight: PackedMatrix, change: Change) -> np.ndarray:
    """The sums of squares of the rows of W + scale * B A, float64 [rows, segments], for this rank's part."""
    part = slot.part(change)
    a, b = np.ascontiguousarray(part.a, np.float32), np.ascontiguousarray(_scaled(part.b, part.scale), np.float32)
    return change_squares(weight, a, b, slot.segments)


def _vectors(part: Change, squares: np.ndarray | None) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The bias with the scale in it, and the factors of the rows."""
    bias = None if part.bias is None else np.float32(part.scale) * part.bias.astype(np.float32)
    if part.magnitude is None or squares is None:
        return bias, None
    total = np.zeros(len(squares))
    for column in squares.T:
        total = total + column
    norms = np.sqrt(total)
    factors = np.divide(part.magnitude.astype(np.float64), norms, out=np.zeros_like(norms), where=norms > 0)
    return bias, factors.astype(np.float32)


def _scaled(b: np.ndarray, scale: float) -> np.ndarray:
    """b with the scale in it, in 16 bits if that is exact."""
    factor = np.float32(scale)
    if factor == 1:
        return b
    exact = b.astype(np.float32) * factor
    if b.dtype not in _TYPES:
        return exact
    with np.errstate(over="ignore"):
        narrow = exact.astype(b.dtype)
    return narrow if np.array_equal(narrow.astype(np.float32), exact) else exact


def _type(array: np.ndarray) -> str:
    return _TYPES.get(array.dtype, "F32")


def _size(array: np.ndarray, segments: int) -> int:
    rows, cols = array.shape
    return -(-packed_bytes(_type(array), rows, cols, segments) // _LINE) * _LINE


def _packed(array: np.ndarray, segments: int, memory: np.ndarray) -> PackedMatrix:
    kind, (rows, cols) = _type(array), array.shape
    values = np.ascontiguousarray(array if kind != "F32" else array.astype(np.float32, copy=False))
    raw = values.view(np.uint8)
    return pack_rows(kind, raw, rows, cols, segments, activation="float32", threads=1, memory=memory)
