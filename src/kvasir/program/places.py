"""What of a traced model adapters may change, and its places in their tables (csrc/low_rank.h)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvasir.layers.adapters import Slot
from kvasir.layers.embedding import Embedding
from kvasir.layers.module import Module
from kvasir.ops.linear.packed import PackedMatrix
from kvasir.program.trace import Trace

_EXPERT = re.compile(r"(.*\.experts\.)\d+(\..*)")


class Expert(NamedTuple):
    """An expert's matrix that this rank has. mixture: the name of the place of all experts. number: among those that
    this rank has."""

    mixture: str
    number: int
    slot: Slot
    matrix: PackedMatrix


class Table(NamedTuple):
    """An embedding of `size` ids. matrix: the rows of ids [first, last) `rows`, which this rank has."""

    matrix: PackedMatrix
    rows: tuple[int, int]
    size: int


class Places:
    """The places of a program, collected while it is built.

    slots: of linears. matrices: theirs. biased: the slots with a bias. tables: of embeddings, by their path. norms: by
    their path. experts: by name; `held` says how many a mixture's place has. elsewhere: names of experts of other
    ranks, and of all that other stages have.
    """

    def __init__(self, trace: Trace):
        self._trace = trace
        self.number: dict[str, int] = {}  # in the tables, by name
        self.slots: dict[str, Slot] = {}
        found = (node.inputs[1] for node in trace.graph.nodes if node.op == "linear")
        self.matrices = {trace.slots[id(weight)].name: weight for weight in found if id(weight) in trace.slots}
        self.biased: set[str] = set()
        self.tables: dict[str, Table] = {}
        self.norms: dict[str, Module] = {}
        self.experts: dict[str, Expert] = {}
        self.held: dict[str, int] = {}

    @property
    def elsewhere(self) -> frozenset[str]:
        return self._trace.elsewhere

    def _place(self, name: str) -> int:
        return self.number.setdefault(name, len(self.number))

    def linear(self, slot: Slot, biased: bool = False) -> int:
        """The number of a slot. biased: whether a bias is added with its product."""
        assert self.slots.setdefault(slot.name, slot) == slot, f"two products of {slot.name}"
        if biased:
            self.biased.add(slot.name)
        return self._place(slot.name)

    def table(self, weight: Any) -> int:
        """The number of a table, -1 if adapters do not change it."""
        path, module = self._trace.modules.get(id(weight), ("", None))
        if not isinstance(module, Embedding):
            return -1
        self.tables[path] = Table(weight, module.rows, module.size)
        return self._place(path)

    def norm(self, weight: Any) -> int:
        """The number of a norm, -1 if adapters do not change it."""
        path, module = self._trace.modules.get(id(weight), ("", None))
        if module is None:
            return -1
        self.norms[path] = module
        return self._place(path)

    def mixture(self, stack: Sequence[PackedMatrix]) -> int:
        """The number of the matrices of all experts of this rank; -1 if there are none."""
        slots = [self._trace.experts.get(id(matrix)) for matrix in stack]
        if not slots or not all(slots):
            return -1
        found = _EXPERT.fullmatch(slots[0].name)  # type: ignore[union-attr]
        assert found is not None
        name = f"{found[1]}*{found[2]}"
        self.held[name] = len(stack)
        for number, (slot, matrix) in enumerate(zip(slots, stack, strict=True)):
            assert slot is not None
            self.experts[slot.name] = Expert(name, number, slot, matrix)
        return self._place(name)

    def part_of(self, name: str) -> tuple[int, int] | None:
        """The columns of a matrix, or the ids of a table, of which this rank has only a part; None if it has all."""
        if name in self.tables:
            table = self.tables[name]
            return None if table.rows == (0, table.size) else table.rows
        slot = self.slots.get(name) or (self.experts[name].slot if name in self.experts else None)
        return slot.shard.columns if slot and slot.shard.parts > 1 else None

    def scaled(self, changes: Mapping[str, Any]) -> dict[str, tuple[Slot, PackedMatrix]]:
        """Slot and matrix of each change with a magnitude, by name."""
        found: dict[str, tuple[Slot, PackedMatrix]] = {}
        for name, change in changes.items():
            if change.magnitude is None or name in self.elsewhere:
                continue
            if name in self.experts:
                found[name] = self.experts[name].slot, self.experts[name].matrix
            else:
                found[name] = self.slots[name], self.matrices[name]
        return found
