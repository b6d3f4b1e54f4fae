"""Puts what an adapter changes on the device, and the entries that kernels find it by (ops/linear/triton_in_effect)."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvasir.graph.adapter_places import Places
from kvasir.layers.adapters import Change, ModelChanges, Replaced, factors_of
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


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """An adapter on the device. entries: int64 [places, ENTRY_FIELDS], which point into `kept`. flags: SCALES or 0.
    chosen: whether it changes something of the rows of logits. nbytes: of all of it."""

    entries: Tensor
    kept: tuple[Tensor, ...]
    flags: int
    chosen: bool

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.entries, *self.kept))


def pack(places: Places, adapter: ModelChanges, device: torch.device) -> PackedAdapter:
    """Packs an adapter of which nothing is `Places.unknown`. Any thread may call it: it changes nothing that a step
    reads. Raises ValueError for shapes that do not fit."""
    packing = _Packing(places, device)
    for name, change in adapter.matrices.items():
        packing.change(name, change)
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

    def change(self, name: str, change: Change) -> None:
        """A low-rank change of a matrix."""
        places = self.places
        pair = places.slots[name].take((change.a, change.b, change.scale))
        self._put(name, A, pair.a)
        self._put(name, B, pair.b)
        self.entries[places.numbers[name], RANK] = len(pair.a)
        if change.bias is not None:
            self._put(name, BIAS, np.float32(change.scale) * change.bias.astype(np.float32))
        if change.magnitude is not None:
            self._put(name, FACTOR, _factor(places.matrices[name], pair.a, pair.b, change.magnitude, self.device))

    def change_table(self, path: str, change: Change) -> None:
        """A low-rank change of a table, whose matrices are transposed."""
        table, b = self.places.tables[path], np.float32(change.scale) * change.b.astype(np.float32)
        if (change.a.shape[1:], b.shape[:1]) != ((table.rows,), (table.cols,)):
            raise ValueError(f"{path} needs A [rank, {table.rows}] and B [{table.cols}, rank]")
        a = change.a.astype(np.float32)
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
            self._put(name, SHIFT, array.astype(np.float32) - own)
        else:
            self._put_rows(name, array)

    def replace_rows(self, path: str, rows: Replaced) -> None:
        """Rows of a table or of the head."""
        places = np.full((self.places.tables.get(path) or self.places.matrices[path]).rows, -1, np.int32)
        places[list(rows.ids)] = np.arange(len(rows.ids))
        self._put(path, PLACES, places, torch.int32)
        self._put_rows(path, rows.rows)

    def _put_rows(self, name: str, rows: np.ndarray) -> None:
        matrix = self.places.tables.get(name) or self.places.matrices[name]
        self._put(name, ROWS, rows, torch_dtype(matrix.dtype))

    def _put(self, name: str, field: int, values: Any, dtype: torch.dtype = torch.float32) -> None:
        values = values if isinstance(values, Tensor) else tensor_of(np.array(values, copy=True, order="C"))
        self.kept.append(values.to(self.device, dtype).contiguous())
        self.entries[self.places.numbers[name], field] = self.kept[-1].data_ptr()


def _factor(matrix: Any, a: np.ndarray, b: np.ndarray, magnitude: np.ndarray, device: torch.device) -> Tensor:
    """magnitude / |W + b a| of each row, float32. b: with the adapter's scale."""
    a_RK, b_NR = (torch.from_numpy(x).to(device) for x in (a, b))
    norms = [
        torch.linalg.vector_norm((rows + b_NR[first : first + len(rows)] @ a_RK).double(), dim=1)
        for first, rows in _rows_of(matrix)
    ]
    return torch.from_numpy(factors_of(magnitude, torch.cat(norms).cpu().numpy()))


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
