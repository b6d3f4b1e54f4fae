"""Puts what an adapter changes on the device, and the entries that kernels find it by (ops/linear/triton_in_effect)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvasir.graph.adapter_places import Places
from kvasir.layers.adapters import Change, ChangePart, ModelChanges, Replaced, factors_of
from kvasir.layers.tensors import TensorPlace, tensor_of, torch_dtype
from kvasir.ops.embedding.triton import lookup
from kvasir.ops.linear.triton_in_effect import (
    BIAS,
    ENTRY_FIELDS,
    FACTOR,
    PLACES,
    RANK,
    ROWS,
    SCALES,
    SHIFT,
    A,
    B,
)

_PIECE = 1 << 21  # values of a matrix that are decoded at a time
_ROWS_OF_SQUARES = 128  # rows whose squares are added at a time


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """An adapter on the device. entries: int64 [places, ENTRY_FIELDS], which point into `kept`. flags: SCALES or 0.
    chosen: whether it changes something of the rows of logits. nbytes: of all of it. rank: not used: there is room for
    the greatest."""

    entries: Tensor
    kept: tuple[Tensor, ...]
    flags: int
    chosen: bool
    rank: int = 0

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.entries, *self.kept))


class Packing:
    """Packs adapters for this rank's calls, as `program.shared_packing.Adapters`. Any thread may call it: it changes
    nothing that a step reads."""

    def __init__(self, places: Places, device: torch.device):
        self._places, self._device = places, device

    def part_of(self, name: str) -> tuple[int, int] | None:
        """The columns of a matrix, if this rank has only some; None if it has all."""
        shard = self._places.slots[name].shard
        return shard.columns if shard.parts > 1 else None

    def check(self, adapter: ModelChanges) -> None:
        """Raises ValueError for what the kernels cannot compute."""
        if what := self._places.unknown(adapter):
            raise ValueError(f"the graph executor cannot compute {what}")

    def squares(self, adapter: ModelChanges) -> dict[str, np.ndarray]:
        """Of each matrix with a magnitude, the sums of the squares of its changed rows, float64 [rows, segments], over
        the columns that this rank has."""
        return {
            name: _squares(self._places.matrices[name], self._places.slots[name].part(change), self._device)
            for name, change in adapter.matrices.items()
            if change.magnitude is not None
        }

    def pack(self, adapter: ModelChanges, squares: Mapping[str, np.ndarray]) -> PackedAdapter:
        """Packs an adapter of which nothing is unknown. squares: of whole rows. Raises ValueError for shapes that do
        not fit."""
        packing = _Packing(self._places, self._device)
        for name, change in adapter.matrices.items():
            packing.change(name, change, squares.get(name))
        for path, change in adapter.tables.items():
            packing.change_table(path, change)
        for name, array in adapter.saved.items():
            packing.replace(name, array)
        for path, rows in adapter.tokens.items():
            packing.replace_rows(path, rows)
        return packing.packed()


class _Packing:
    def __init__(self, places: Places, device: torch.device):
        self.places, self.device = places, device
        self.entries = np.zeros((places.count, ENTRY_FIELDS), np.int64)
        self.kept: list[Tensor] = []
        self.norms: dict[str, Any] = {}  # copies with the adapter's weights

    def packed(self) -> PackedAdapter:
        for path, norm in self.norms.items():
            self._put(path, ROWS, norm.weight)
            if hasattr(norm, "bias"):
                self._put(path, SHIFT, norm.bias)
        products = [number for name in self.places.slots for number in self.places.numbers[name]]
        scales = self.entries[np.ix_(products, [FACTOR, ROWS])].any()
        chosen = self.entries[list(self.places.chosen)].any()
        entries = torch.from_numpy(self.entries).to(self.device, copy=True)
        return PackedAdapter(entries, tuple(self.kept), SCALES if scales else 0, bool(chosen))

    def change(self, name: str, change: Change, squares: np.ndarray | None) -> None:
        """A low-rank change of a matrix. squares: of its rows, if the change has a magnitude."""
        places, slot = self.places, self.places.slots[name]
        part = slot.part(change)
        # Where ranks share a sum, each has all columns of its inputs here.
        a = change.a if slot.shard.parts > 1 else part.a
        self._put(name, A, a.astype(np.float32))
        self._put(name, B, _scaled(part))
        self.entries[places.numbers[name], RANK] = len(a)
        if part.bias is not None:
            self._put(name, BIAS, np.float32(change.scale) * part.bias.astype(np.float32))
        if part.magnitude is not None:
            assert squares is not None, f"no squares of {name}"
            norms = np.sqrt(reduce(np.add, squares.T))
            self._put(name, FACTOR, torch.from_numpy(factors_of(part.magnitude, norms)))

    def change_table(self, path: str, change: Change) -> None:
        """A low-rank change of a table, whose matrices are transposed."""
        table, b = self.places.tables[path], np.float32(change.scale) * change.b.astype(np.float32)
        rows, size = self._rows(path, table.rows), self.places.sizes[path]
        if (change.a.shape[1:], b.shape[:1]) != ((size,), (table.cols,)):
            raise ValueError(f"{path} needs A [rank, {size}] and B [{table.cols}, rank]")
        a = change.a[:, rows].astype(np.float32)
        self._put(path, A, a.T)
        self._put(path, B, b.T)
        self.entries[self.places.numbers[path], RANK] = len(a)
        if change.magnitude is not None:
            self._put(path, FACTOR, _table_factor(table, a, b, change.magnitude, self.device))

    def replace(self, full: str, array: np.ndarray) -> None:
        """A tensor that replaces one of the model."""
        name, _, kind = full.rpartition(".")
        if name in self.places.norms:
            norm = self.norms.setdefault(name, copy(self.places.norms[name]))
            norm.put(kind, array, TensorPlace(torch.float32, self.device))
        elif kind == "bias":
            own = self.places.biases[name].float().cpu().numpy()
            rows = slice(*self.places.slots[name].shard.rows)
            self._put(name, SHIFT, array[rows].astype(np.float32) - own)
        else:
            held = (self.places.tables.get(name) or self.places.matrices[name]).rows
            self._put_rows(name, array[self._rows(name, held)])

    def replace_rows(self, path: str, rows: Replaced) -> None:
        """Rows of a table or of the head."""
        held = (self.places.tables.get(path) or self.places.matrices[path]).rows
        own = self._rows(path, held)
        places = np.full(held, -1, np.int32)
        for at, row in enumerate(rows.ids):
            if own.start <= row < own.stop:
                places[row - own.start] = at
        self._put(path, PLACES, places, torch.int32)
        self._put_rows(path, rows.rows)

    def _rows(self, path: str, held: int) -> slice:
        """The rows of a table or a matrix that this rank has. held: their number."""
        if path in self.places.slots and path not in self.places.tables:
            return slice(*self.places.slots[path].shard.rows)
        first = self.places.firsts.get(path, 0)
        return slice(first, first + held)

    def _put_rows(self, name: str, rows: np.ndarray) -> None:
        matrix = self.places.tables.get(name) or self.places.matrices[name]
        self._put(name, ROWS, rows, torch_dtype(matrix.dtype))

    def _put(self, name: str, field: int, values: Any, dtype: torch.dtype = torch.float32) -> None:
        values = values if isinstance(values, Tensor) else tensor_of(np.array(values, copy=True, order="C"))
        self.kept.append(values.to(self.device, dtype).contiguous())
        self.entries[self.places.numbers[name], field] = self.kept[-1].data_ptr()


def _scaled(part: ChangePart) -> np.ndarray:
    return np.float32(part.scale) * part.b.astype(np.float32)


def _squares(matrix: Any, part: ChangePart, device: torch.device) -> np.ndarray:
    """The sums of the squares of the rows of W + b a, float64 [rows, segments], over the columns of each segment. Ranks
    have other numbers of rows and columns, so all shapes are of fixed rows and of one segment."""
    a_RK, b_NR = (torch.from_numpy(np.array(x, np.float32, order="C")).to(device) for x in (part.a, _scaled(part)))
    found = []
    for first in range(0, matrix.rows, _ROWS_OF_SQUARES):
        ids = torch.arange(first, first + _ROWS_OF_SQUARES, dtype=torch.int32, device=device).clamp(max=matrix.rows - 1)
        rows = torch.empty(len(ids), matrix.cols, dtype=torch.float32, device=device)
        lookup(ids, matrix, rows)
        for a_K, b_N in zip(a_RK, b_NR[ids.long()].T, strict=True):  # a library's product would depend on the shape
            rows += b_N[:, None] * a_K
        parts = rows.double().square().chunk(matrix.segments, 1)
        found.append(torch.stack([one.contiguous().sum(1) for one in parts], 1))
    return torch.cat(found)[: matrix.rows].cpu().numpy()


def _table_factor(table: Any, a: np.ndarray, b: np.ndarray, magnitude: np.ndarray, device: torch.device) -> Tensor:
    """As `_factor`, of each column of a table."""
    a_RN, b_DR = (torch.from_numpy(x).to(device) for x in (a, b))
    squares = torch.zeros(table.cols, dtype=torch.float64, device=device)
    for first, rows in _rows_of(table):
        squares += (rows + a_RN[:, first : first + len(rows)].T @ b_DR.T).double().square().sum(0)
    return torch.from_numpy(factors_of(magnitude, squares.sqrt().cpu().numpy()))


def _rows_of(matrix: Any) -> Iterator[tuple[int, Tensor]]:
    """The rows of a matrix as float32, some at a time, each time with the number of the first."""
    step = max(1, _PIECE // matrix.cols)
    for first in range(0, matrix.rows, step):
        ids = torch.arange(first, min(first + step, matrix.rows), dtype=torch.int32, device=matrix.data.device)
        rows = torch.empty(len(ids), matrix.cols, dtype=torch.float32, device=matrix.data.device)
        lookup(ids, matrix, rows)
        yield first, rows
