"""Packing what an adapter changes: the structures of csrc/low_rank.h, their matrices in one piece of memory."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np

from kvasir.errors import quoted
from kvasir.layers.adapters import Change, ModelChanges, Replaced, Slot, factors_of
from kvasir.layers.embedding import PANEL
from kvasir.layers.places import HostPlace
from kvasir.ops.linear.native import change_squares, lookup
from kvasir.ops.linear.packed import PackedMatrix, allocate, pack_rows, packed_bytes
from kvasir.parallel import MAX_RANKS, cut
from kvasir.program import native
from kvasir.program.places import Places, Table

MAX_RANK = 4096  # of csrc/adapters.h
_LINE = 64
_ROWS = 4096  # of a table that are read at a time
_TYPES = {np.dtype(np.float16): "F16", np.dtype(ml_dtypes.bfloat16): "BF16"}  # others are stored as F32
_HEAD = "head"


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """An adapter for a program. table: LowRankStruct of each place, which points into `kept`. rank: the greatest.
    nbytes: of everything that it keeps in memory."""

    table: Any
    kept: Any
    rank: int
    nbytes: int

    @property
    def address(self) -> int:
        return ctypes.addressof(self.table)


def unknown(places: Places, adapter: ModelChanges) -> str:
    """What of an adapter a program with these places cannot compute; empty if it can."""
    for name, change in adapter.matrices.items():
        if name not in places.slots and name not in places.experts and name not in places.elsewhere:
            return f"a change of {quoted(name)}"
        if len(change.a) > MAX_RANK:
            return f"a rank of {len(change.a)} for {quoted(name)}, more than {MAX_RANK}"
    for path in (*adapter.tables, *adapter.tokens):
        if path not in places.tables and path not in places.elsewhere and not (path == _HEAD and path in places.slots):
            return f"a change of the table {quoted(path)}"
    return next(
        (f"a tensor that replaces {quoted(full)}" for full in adapter.saved if not _replaceable(places, full)), ""
    )


def _replaceable(places: Places, full: str) -> bool:
    name, _, kind = full.rpartition(".")
    if name in places.norms or name in places.elsewhere:
        return True
    if kind == "bias":
        return name in places.biased
    slot = places.slots.get(name)
    return name in places.tables or bool(slot and places.matrices[name].scale == 1.0)


def pack(places: Places, adapter: ModelChanges, squares: Mapping[str, np.ndarray]) -> PackedAdapter:
    """Packs this rank's part of an adapter, of which nothing is `unknown`. squares: by place with a magnitude,
    `squares_of` the whole rows, or `table_squares` of the whole table. A and B keep 16-bit numbers if B's are still
    exact with the scale in them. Raises ValueError for shapes that do not fit."""
    packing = _Packing(places)
    for name, change in adapter.matrices.items():
        packing.change(name, change, squares.get(name))
    for path, change in adapter.tables.items():
        packing.change_table(path, change, squares.get(path))
    for name, array in adapter.saved.items():
        packing.replace(name, array)
    for path, rows in adapter.tokens.items():
        packing.replace_rows(path, rows)
    return packing.packed()


def squares_of(slot: Slot, weight: PackedMatrix, change: Change) -> np.ndarray:
    """The sums of squares of the rows of W + scale * B A, float64 [rows, segments], for this rank's part."""
    part = slot.part(change)
    a, b = np.ascontiguousarray(part.a, np.float32), np.ascontiguousarray(_scaled(part.b, part.scale), np.float32)
    return change_squares(weight.present(), a, b, slot.segments)


def table_squares(table: Table, change: Change) -> np.ndarray:
    """The sums of squares of the columns of a table with its change, float64 [cols, segments]: of the ids that each of
    MAX_RANKS ranks would have, row after row, for those that this rank has."""
    _check_table(table, change)
    borders = cut(table.size, MAX_RANKS, PANEL).borders
    own = [(first, last) for first, last in pairwise(borders) if table.rows[0] <= first < last <= table.rows[1]]
    b = np.ascontiguousarray(_scaled(change.b, change.scale), np.float32)
    return np.stack([_column_squares(table, change.a, b, *segment) for segment in own], 1)


class _Packing:
    """Collects matrices and vectors with the fields that point to them."""

    def __init__(self, places: Places):
        self.places = places
        self.table = (native.LowRankStruct * len(places.number))()
        self.experts: dict[str, Any] = {}
        self.matrices: list[tuple[Any, str, np.ndarray, int]] = []  # entry, field, array, segments
        self.kept: list[Any] = []
        self.norms: dict[str, Any] = {}  # copies of norms, by path
        self.rank = 0

    def _entry(self, name: str) -> Any:
        return self.table[self.places.number[name]]

    def _matrix(self, entry: Any, field: str, array: np.ndarray, segments: int = 1) -> None:
        self.matrices.append((entry, field, array, segments))

    def _vector(self, entry: Any, field: str, array: np.ndarray | None, kind: Any = np.float32) -> None:
        if array is not None:
            self.kept.append(np.ascontiguousarray(array, kind))
            setattr(entry, field, self.kept[-1].ctypes.data)

    # -- low rank

    def change(self, name: str, change: Change, squares: np.ndarray | None) -> None:
        """Of a linear, the head, or an expert, whose place all experts share."""
        if name in self.places.elsewhere:
            return
        if name in self.places.slots:
            return self._change(self._entry(name), self.places.slots[name], change, squares)
        mixture, number, slot, _ = self.places.experts[name]
        if mixture not in self.experts:
            made = self.experts[mixture] = (native.LowRankStruct * self.places.held[mixture])()
            self._entry(mixture).experts = ctypes.addressof(made)
        self._change(self.experts[mixture][number], slot, change, squares)

    def _change(self, entry: Any, slot: Slot, change: Change, squares: np.ndarray | None) -> None:
        part = slot.part(change)
        self.rank = max(self.rank, len(part.a))
        self._matrix(entry, "a", part.a, slot.segments)
        self._matrix(entry, "b", _scaled(part.b, part.scale))
        bias, factors = _vectors(part, squares)
        self._vector(entry, "bias", bias)
        self._vector(entry, "factors", factors)

    def change_table(self, path: str, change: Change, squares: np.ndarray | None) -> None:
        """Of a table, whose rows are looked up in the transposed A."""
        if path in self.places.elsewhere:
            return
        entry, table = self._entry(path), self.places.tables[path]
        _check_table(table, change)
        self._matrix(entry, "a", change.a.T[slice(*table.rows)])
        self._matrix(entry, "b", _scaled(change.b, change.scale))
        if change.magnitude is not None and squares is not None:
            self._vector(entry, "factors", factors_of(change.magnitude, np.sqrt(_total(squares))))

    # -- replaced

    def replace(self, full: str, array: np.ndarray) -> None:
        """A tensor of a linear, the head, a table or a norm."""
        name, _, kind = full.rpartition(".")
        if name in self.places.elsewhere:
            return
        entry = self._entry(name)
        if name in self.places.norms:
            return self._replace_norm(name, entry, kind, array)
        slot = self.places.slots.get(name)
        if slot is None:
            return self._matrix(entry, "replacement", array[slice(*self.places.tables[name].rows)])
        rows = array[slice(*slot.shard.rows)]
        if kind == "bias":
            return self._vector(entry, "vector", rows)
        self._matrix(entry, "replacement", rows[:, slice(*slot.shard.columns)], slot.segments)

    def _replace_norm(self, path: str, entry: Any, tensor: str, array: np.ndarray) -> None:
        norm = self.norms.setdefault(path, copy(self.places.norms[path]))
        norm.put(tensor, array, HostPlace())
        self._vector(entry, "vector", norm.weight)
        self._vector(entry, "second", getattr(norm, "bias", None))

    def replace_rows(self, path: str, rows: Replaced) -> None:
        """Rows of a table or of the head."""
        if path in self.places.elsewhere:
            return
        ids, slot = np.array(rows.ids, np.int64), None if path in self.places.tables else self.places.slots[path]
        first, last = slot.shard.rows if slot else self.places.tables[path].rows
        order = np.argsort(ids)
        order = order[(ids[order] >= first) & (ids[order] < last)]
        if len(order):
            self._vector(self._entry(path), "ids", ids[order] - first, np.int32)
            self._matrix(self._entry(path), "rows", rows.rows[order], slot.segments if slot else 1)

    # -- memory

    def packed(self) -> PackedAdapter:
        """The adapter, with all matrices after each other."""
        sizes = [_size(array, segments) for _, _, array, segments in self.matrices]
        memory, at = allocate(max(_LINE, sum(sizes))), 0
        for (entry, field, array, segments), size in zip(self.matrices, sizes, strict=True):
            matrix = _packed(array, segments, memory[at : at + size])
            setattr(entry, field, matrix.address)
            self.kept.append(matrix)
            at += size
        vectors = sum(array.nbytes for array in self.kept if isinstance(array, np.ndarray))
        tables = sum(map(ctypes.sizeof, (self.table, *self.experts.values())))
        kept = memory, self.kept, self.experts
        return PackedAdapter(self.table, kept, self.rank, memory.nbytes + vectors + tables)


def _vectors(part: Change, squares: np.ndarray | None) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The bias with the scale in it, and the factors of the rows."""
    bias = None if part.bias is None else np.float32(part.scale) * part.bias.astype(np.float32)
    if part.magnitude is None or squares is None:
        return bias, None
    return bias, factors_of(part.magnitude, np.sqrt(_total(squares)))


def _total(squares: np.ndarray) -> np.ndarray:
    """The sums over segments, in their order."""
    total = np.zeros(len(squares))
    for column in squares.T:
        total = total + column
    return total


def _check_table(table: Table, change: Change) -> None:
    if (change.a.shape[1:], change.b.shape[:1]) != ((table.size,), (table.matrix.cols,)):
        raise ValueError(f"a table needs A [rank, {table.size}] and B [{table.matrix.cols}, rank]")


def _column_squares(table: Table, a: np.ndarray, b: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Of the ids [begin, end), float64 [cols]. b: with the scale in it."""
    total = np.zeros(table.matrix.cols)
    for first in range(begin, end, _ROWS):
        ids = np.arange(first, min(first + _ROWS, end))
        with np.errstate(over="ignore", invalid="ignore"):
            changed = lookup(table.matrix, ids - table.rows[0]) + a[:, ids].astype(np.float32).T @ b.T
        total += np.square(changed.astype(np.float64)).sum(0)
    return total


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
