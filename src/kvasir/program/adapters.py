"""The adapters of a program: what csrc/adapters.h reads, and its memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from torch import Tensor

from kvasir.layers.adapters import Pairs, Slot, check_adapter
from kvasir.ops.linear.low_rank import LowRank
from kvasir.ops.linear.packed import PackedMatrix, pack_rows
from kvasir.program import native

_LINE = 16  # float32 in a cache line


class Adapters:
    """The slots of a program's linears, filled while it is built, and what adapters put there.

    struct: what the kernels read, once anything was put there; until then steps know of no adapters.
    """

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self.slots: dict[str, Slot] = {}  # by name, in the order of the tables
        self.parts = self.widest = 0
        self.struct = native.Adapters()
        self._tables = (ctypes.c_void_p * native.MAX_ADAPTERS)()
        self._kept: dict[int, Any] = {}
        self._of_rows = np.zeros(max_tokens, np.int32)

    def linear(self, products: list[tuple[Slot | None, bool]]) -> list[int]:
        """The places of a linear's slots, each (slot, whether its product is written onto a residual); -1 for none."""
        self.parts = max(self.parts, len(products))
        self.widest = max([self.widest, *(slot.shape[0] for slot, onto in products if slot and onto)])
        return [self.place(slot) if slot else -1 for slot, _ in products]

    def place(self, slot: Slot) -> int:
        assert self.slots.setdefault(slot.name, slot) == slot, f"two products of {slot.name}"
        self.parts = max(self.parts, 1)
        return list(self.slots).index(slot.name)

    def inner(self, rows: int) -> np.ndarray:
        """a x of a step's first rows for the first matrix of a linear, float32 [rows, rank]; no rows where none of them
        has an adapter."""
        if not self.struct.tables or not self._of_rows[:rows].any():
            return np.empty((0, 0), np.float32)
        return self._inner[: rows * self.struct.rank].reshape(rows, -1)

    def set(self, adapter: int, pairs: Pairs) -> None:
        """See Program.set_adapter."""
        check_adapter(adapter, pairs, self.slots)
        if adapter >= native.MAX_ADAPTERS:
            raise ValueError(f"adapter ids end at {native.MAX_ADAPTERS - 1}, before {adapter}")
        made = {name: _pack(self.slots[name].take(pair)) for name, pair in pairs.items()}
        table = (native.LowRank * len(self.slots))()
        for entry, slot in zip(table, self.slots, strict=True):
            if slot in made:
                entry.a, entry.b = (matrix.address for matrix in made[slot])
        self._grow(max((a.rows for a, _ in made.values()), default=0))
        self._tables[adapter] = ctypes.addressof(table)
        self._kept[adapter] = table, made

    def remove(self, adapter: int) -> None:
        """Takes an adapter away; rows that still ask for it make their step fail."""
        if adapter in self._kept:
            self._tables[adapter] = None
            del self._kept[adapter]

    def _grow(self, rank: int) -> None:
        """Room for adapters up to this rank."""
        s = self.struct
        rank = -(-max(rank, 1) // _LINE) * _LINE
        if rank <= s.rank:
            return
        self._inner = np.zeros(self.parts * self.max_tokens * rank, np.float32)
        self._sums = np.zeros(self.max_tokens * self.widest, np.float32)
        s.tables, s.count = ctypes.addressof(self._tables), native.MAX_ADAPTERS
        s.max_tokens, s.rank = self.max_tokens, rank
        s.of_rows, s.inner, s.sums = (a.ctypes.data for a in (self._of_rows, self._inner, self._sums))


def _pack(pair: LowRank) -> tuple[PackedMatrix, PackedMatrix]:
    return _matrix(pair.a, pair.segments), _matrix(pair.b, 1)


def _matrix(tensor: Tensor, segments: int) -> PackedMatrix:
    rows, cols = tensor.shape
    return pack_rows("F32", tensor.numpy().view(np.uint8), rows, cols, segments, threads=1)
