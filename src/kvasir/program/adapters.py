"""The LoRA adapters of a program: the structures that csrc/adapters.h reads, and their memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from kvasir.layers.adapters import Pairs, Slot, check_adapter
from kvasir.ops.linear.low_rank import LowRankPair
from kvasir.ops.linear.packed import PackedMatrix, pack_rows
from kvasir.program import native

_LINE = 16  # float32 values per cache line


class Adapters:
    """The slots of a program's linears, collected while it is built, and the matrices that adapters put into them.

    max_tokens: token rows of a step. struct: read by the kernels once an adapter is set; without one, steps skip
    adapters altogether.
    """

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self.slots: dict[str, Slot] = {}  # by name, in the order of the tables
        self.parts = self.widest = 0
        self.struct = native.AdaptersStruct()
        self._tables = (ctypes.c_void_p * native.MAX_ADAPTERS)()
        self._kept: dict[int, Any] = {}
        self._of_rows = np.zeros(max_tokens, np.int32)

    def linear(self, products: list[tuple[Slot | None, bool]]) -> list[int]:
        """The table index of each product's slot, -1 for a product without one. products: (slot, whether the product is
        added onto its residual in place)."""
        self.parts = max(self.parts, len(products))
        self.widest = max([self.widest, *(slot.shape[0] for slot, onto in products if slot and onto)])
        return [self.place(slot) if slot else -1 for slot, _ in products]

    def place(self, slot: Slot) -> int:
        """The table index of a slot, which is added if it is new."""
        assert self.slots.setdefault(slot.name, slot) == slot, f"two products of {slot.name}"
        self.parts = max(self.parts, 1)
        return list(self.slots).index(slot.name)

    def inner(self, rows: int) -> np.ndarray:
        """The products a x of the first rows of a step for the first matrix of a linear, float32 [rows, rank]; empty if
        none of these rows has an adapter."""
        if not self.struct.tables or not self._of_rows[:rows].any():
            return np.empty((0, 0), np.float32)
        return self._inner[: rows * self.struct.rank].reshape(rows, -1)

    def set(self, adapter: int, pairs: Pairs) -> None:
        """Packs the matrix pairs of an adapter and installs them; see Program.set_adapter."""
        check_adapter(adapter, pairs, self.slots)
        if adapter >= native.MAX_ADAPTERS:
            raise ValueError(f"adapter ids end at {native.MAX_ADAPTERS - 1}, before {adapter}")
        made = {name: _pack(self.slots[name].take(pair)) for name, pair in pairs.items()}
        table = (native.LowRankStruct * len(self.slots))()
        for entry, slot in zip(table, self.slots, strict=True):
            if slot in made:
                entry.a, entry.b = (matrix.address for matrix in made[slot])
        self._grow(max((a.rows for a, _ in made.values()), default=0))
        self._tables[adapter] = ctypes.addressof(table)
        self._kept[adapter] = table, made

    def remove(self, adapter: int) -> None:
        """Removes an adapter; a step with rows that still use it fails."""
        if adapter in self._kept:
            self._tables[adapter] = None
            del self._kept[adapter]

    def _grow(self, rank: int) -> None:
        """Allocates buffers for adapters of up to this rank."""
        s = self.struct
        rank = -(-max(rank, 1) // _LINE) * _LINE
        if rank <= s.rank:
            return
        self._inner = np.zeros(self.parts * self.max_tokens * rank, np.float32)
        self._sums = np.zeros(self.max_tokens * self.widest, np.float32)
        s.tables, s.count = ctypes.addressof(self._tables), native.MAX_ADAPTERS
        s.max_tokens, s.rank = self.max_tokens, rank
        s.of_rows, s.inner, s.sums = (a.ctypes.data for a in (self._of_rows, self._inner, self._sums))


def _pack(pair: LowRankPair) -> tuple[PackedMatrix, PackedMatrix]:
    return _matrix(pair.a, pair.segments), _matrix(pair.b, 1)


def _matrix(array: np.ndarray, segments: int) -> PackedMatrix:
    rows, cols = array.shape
    return pack_rows("F32", array.view(np.uint8), rows, cols, segments, threads=1)
