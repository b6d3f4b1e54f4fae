"""The LoRA adapters of a program: the structures that csrc/adapters.h reads, and their buffers."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np

from kvasir.layers.adapters import ModelChanges, Slot, check_id
from kvasir.program import native
from kvasir.program.changes import PackedAdapter, pack, squares_of, table_squares, unknown
from kvasir.program.places import Places
from kvasir.program.products import Product
from kvasir.program.trace import Trace

_LINE = 16  # float32 values per cache line


class Adapters:
    """The places that adapters may change, collected while a program is built, and the adapters that are set.

    max_tokens, max_chosen: rows of a step's sections. struct: read by the kernels once an adapter is set; without one,
    steps skip adapters altogether.
    """

    def __init__(self, trace: Trace, max_tokens: int, max_chosen: int):
        self.max_tokens, self.max_chosen = max_tokens, max_chosen
        self.places = Places(trace)
        self.parts = self.widest = 0
        self.struct = native.AdaptersStruct()
        self._tables = (ctypes.c_void_p * native.MAX_ADAPTERS)()
        self._set: dict[int, PackedAdapter] = {}
        self._numbers: list[np.ndarray] = []
        self._buffers: dict[str, np.ndarray] = {}

    def linear(self, products: Sequence[tuple[Product, bool]]) -> np.ndarray | None:
        """The number of each product's place, int64, -1 for a product without one; None if no product has one.
        products: with whether it is added onto its residual in place."""
        if not any(product.slot for product, _ in products):
            return None
        self.parts = max(self.parts, len(products))
        self.widest = max([self.widest, *(product.out.width for product, onto in products if onto)])
        self._numbers.append(np.array([self._number(product) for product, _ in products], np.int64))
        return self._numbers[-1]

    def _number(self, product: Product) -> int:
        if product.slot is None:
            return -1
        return self.places.linear(product.slot, product.bias is not None)

    def place(self, slot: Slot) -> int:
        """The number of a slot."""
        self.parts = max(self.parts, 1)
        return self.places.linear(slot)

    def inner(self) -> np.ndarray:
        """The products A x of the adapted token rows of a step for the first matrix of a linear, float32 [entries,
        rank]; empty if there are none."""
        if not self.struct.tables or not self.struct.tokens.count:
            return np.empty((0, 0), np.float32)
        return self._buffers["inner"][: self.struct.tokens.count * self.struct.rank].reshape(-1, self.struct.rank)

    def first_inner(self, count: int) -> np.ndarray:
        """The first products A x of a pass over experts, float32 [count, rank]."""
        return self._buffers["inner"][: count * self.struct.rank].reshape(count, -1)

    def scales(self) -> np.ndarray:
        """The scale of each row of `inner`."""
        return self._buffers["token_scales"][: self.struct.tokens.count]

    # -- packing, by any thread

    @property
    def slots(self) -> Mapping[str, Slot]:
        """Of linears."""
        return self.places.slots

    def squares(self, adapter: ModelChanges) -> dict[str, np.ndarray]:
        """`changes.squares_of` this rank's part of each matrix with a magnitude, `table_squares` of each table."""
        scaled, tables = self.places.scaled(adapter.matrices), self.places.tables
        found = {name: squares_of(slot, matrix, adapter.matrices[name]) for name, (slot, matrix) in scaled.items()}
        return found | {
            path: table_squares(tables[path], change)
            for path, change in adapter.tables.items()
            if change.magnitude is not None and path in tables
        }

    def part_of(self, name: str) -> tuple[int, int] | None:
        """See Places.part_of."""
        return self.places.part_of(name)

    def pack(self, adapter: ModelChanges, squares: Mapping[str, np.ndarray]) -> PackedAdapter:
        """See changes.pack. Raises ValueError for what the program cannot compute."""
        return pack(self.places, adapter, squares)

    def lacks(self, adapter: ModelChanges) -> str:
        """What of an adapter the program cannot compute; empty if it can."""
        return unknown(self.places, adapter)

    def check(self, adapter: ModelChanges) -> None:
        """Raises ValueError for what the program cannot compute."""
        if what := self.lacks(adapter):
            raise ValueError(f"the program cannot compute {what}")

    # -- between steps

    def set(self, adapter: int, packed: PackedAdapter) -> None:
        """Installs a packed adapter; see Program.set_adapter."""
        check_id(adapter, native.MAX_ADAPTERS)
        self._grow(packed.rank)
        self._tables[adapter] = packed.address
        self._set[adapter] = packed

    def remove(self, adapter: int) -> None:
        """Removes an adapter; a step with rows that still use it fails."""
        if adapter in self._set:
            self._tables[adapter] = None
            del self._set[adapter]

    def _grow(self, rank: int) -> None:
        """Allocates buffers for adapters of up to this rank. The system gives memory where it is written first."""
        s = self.struct
        rank = -(-max(rank, 1) // _LINE) * _LINE
        if rank <= s.rank:
            return
        made, applied = self._buffers, native.MAX_APPLIED
        if not s.tables:
            made["sums"] = np.zeros(self.max_tokens * self.widest, np.float32)
            made["in_effect"] = np.zeros(self.max_tokens * applied, np.dtype(native.InEffect))
            made["group_of"] = np.zeros(native.MAX_ADAPTERS, np.int32)
            for rows, name, count in ((s.tokens, "token", self.max_tokens), (s.chosen, "chosen", self.max_chosen)):
                made[f"{name}_groups"] = np.zeros(count * applied, np.dtype(native.AdapterGroup))
                made[f"{name}_rows"] = np.zeros(count * applied, np.int32)
                made[f"{name}_scales"] = np.zeros(count * applied, np.float32)
                rows.group, rows.rows, rows.scales = (
                    made[f"{name}_{what}"].ctypes.data for what in ("groups", "rows", "scales")
                )
        made["inner"] = np.zeros(self.parts * self.max_tokens * applied * rank, np.float32)
        s.tables, s.count, s.rank = ctypes.addressof(self._tables), native.MAX_ADAPTERS, rank
        s.in_effect, s.group_of, s.inner, s.sums = (
            made[name].ctypes.data for name in ("in_effect", "group_of", "inner", "sums")
        )
