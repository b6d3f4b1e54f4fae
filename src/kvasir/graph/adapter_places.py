"""What adapters may change in the calls of a forward, by numbers (places) in the tables of device memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvasir.errors import quoted
from kvasir.graph.fold import Call
from kvasir.graph.layout import weights_of
from kvasir.layers.adapters import ModelChanges, Slot
from kvasir.layers.module import Module
from kvasir.ops.graph import CHOSEN, CannotTrace
from kvasir.ops.linear.triton_low_rank import MAX_RANK, split
from kvasir.program.trace import Trace

_KINDS = ("qkv", "product", "linear", "gated")  # of calls that products of adapters change
_OTHERS = ("embedding", "join", "norm")  # of calls of tables and norms
HEAD = "head"


@dataclass(frozen=True, slots=True)
class Change:
    """A call whose products adapters may change. first: the number of its first matrix. rows, cols: of the whole
    matrices, of which ranks may have columns. apart: whether they have results of their own, as gate and up do. dtype:
    of rows that replace those of the matrices. domain: of the call. shared: the ranks that share its sum, and the
    number of its parts; None if they do not."""

    first: int
    rows: tuple[int, ...]
    cols: int
    apart: bool
    dtype: str
    domain: str
    shared: tuple[Any, int] | None = None

    @property
    def leads(self) -> bool:
        """Whether this rank adds what adapters add to the sum: the first part does."""
        return self.shared is None or self.shared[0].part(self.shared[1]) == 0

    def inner(self, count: int) -> tuple[int, ...]:
        """The shape of the products a x, for `count` rows, without the levels and ranks of each."""
        return len(self.rows), split(self.cols)[0], count

    def delta(self, count: int) -> tuple[int, ...]:
        return (len(self.rows), count, self.rows[0]) if self.apart else (count, sum(self.rows))


@dataclass(slots=True)
class Places:
    """calls: by the `id()` of each call that adapters may change. count: of the places. numbers: of the places of each
    name, a slot or the path of a table; several where calls share it. chosen: places of calls for rows of logits.
    slots: by name. matrices, tables: those of slots and of tables. firsts, sizes: of each table, the id of the first
    row that this rank has, and how many there are in all. biases: of linear layers, by slot. norms: by path.
    others: by the `id()` of each call of a table or a norm, its place."""

    calls: dict[int, Change] = field(default_factory=dict)
    count: int = 0
    numbers: dict[str, list[int]] = field(default_factory=dict)
    chosen: set[int] = field(default_factory=set)
    slots: dict[str, Slot] = field(default_factory=dict)
    matrices: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, Any] = field(default_factory=dict)
    firsts: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    biases: dict[str, Tensor] = field(default_factory=dict)
    norms: dict[str, Module] = field(default_factory=dict)
    others: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: Trace, calls: Sequence[Call]) -> Places:
        """Raises CannotTrace if a slot's matrix is read by another kind of call."""
        places, made = cls(), dict[int, list[str]]()
        shared = {
            id(call.reads[0].base): (call.takes["mesh"], call.takes["parts"])
            for call in calls
            if call.kind in ("gather", "all_reduce")
        }
        for call in calls:
            if call.kind in ("gather", "all_reduce"):
                made[id(call.writes[0].base)] = made.get(id(call.reads[0].base), [])
            weight = id(call.takes.get("weight"))
            if weight in trace.modules and call.kind in _OTHERS:
                places._add_other(call, *trace.modules[weight])
            elif call.kind not in _OTHERS and (
                slots := [trace.slots[id(weight)] for weight in weights_of(call) if id(weight) in trace.slots]
            ):
                places._add_products(call, slots, shared.get(id(call.writes[0].base)))
                made[id(call.writes[0].base)] = [slot.name for slot in slots]
            source = call.writes if call.kind == "linear" else call.reads
            places._add_biases(made.get(id(source[0].base), ()) if source else (), _biases_of(call))
        return places

    def _add_products(self, call: Call, slots: Sequence[Slot], shared: tuple[Any, int] | None) -> None:
        weights = weights_of(call)
        if call.kind not in _KINDS or len(slots) < len(weights):
            raise CannotTrace(f"no Triton kernel for an adapter of {slots[0].name}")
        rows, first = tuple(weight.rows for weight in weights), weights[0]
        self.calls[id(call)] = Change(
            self.count, rows, slots[0].shape[1], call.kind == "gated", first.dtype, call.domain, shared
        )  # fmt: skip
        for slot, weight in zip(slots, weights, strict=True):
            self._number(slot.name, call)
            self.slots[slot.name], self.matrices[slot.name] = slot, weight

    def _add_other(self, call: Call, path: str, module: Any) -> None:
        self.others[id(call)] = self.count
        self._number(path, call)
        if call.kind == "embedding":
            self.tables[path], self.firsts[path] = call.takes["weight"], call.takes["first"]
            self.sizes[path] = module.size
        else:
            self.norms[path] = module

    def _add_biases(self, names: Sequence[str], biases: Sequence[Tensor | None]) -> None:
        for name, bias in zip(names, biases, strict=False):
            if bias is not None:
                self.biases.setdefault(name, bias)

    def _number(self, name: str, call: Call) -> None:
        if call.domain == CHOSEN:
            self.chosen.add(self.count)
        self.numbers.setdefault(name, []).append(self.count)
        self.count += 1

    def unknown(self, adapter: ModelChanges) -> str:
        """What of an adapter the kernels cannot compute; empty if they can."""
        for name, change in adapter.matrices.items():
            if name not in self.slots:
                return f"a change of {quoted(name)}"
            if len(change.a) > MAX_RANK:
                return f"a rank of {len(change.a)} for {quoted(name)}, more than {MAX_RANK}"
        for path in (*adapter.tables, *adapter.tokens):
            if path not in self.tables and not (path == HEAD and path in self.slots and path in adapter.tokens):
                return f"a change of the table {quoted(path)}"
        scaled = (path for path, change in adapter.tables.items() if change.magnitude is not None)
        if shared := next((path for path in scaled if self.tables[path].rows < self.sizes[path]), ""):
            return f"a magnitude of {quoted(shared)}, whose rows several ranks share,"
        if both := next((path for path in adapter.tokens if f"{path}.weight" in adapter.saved), ""):
            return f"rows of {quoted(both)} and all of it"
        return next(
            (f"a tensor that replaces {quoted(full)}" for full in adapter.saved if not self._replaces(full)), ""
        )

    def _replaces(self, full: str) -> bool:
        name, _, kind = full.rpartition(".")
        if name in self.norms:
            return True
        return name in self.biases if kind == "bias" else name in self.slots or name in self.tables


def _biases_of(call: Call) -> Sequence[Tensor | None]:
    """What a call adds to each of the products that it computes or reads."""
    if call.kind == "place_qkv":
        return call.takes["biases"]
    if call.kind in ("linear", "join"):
        return (call.takes["bias"],)
    return call.takes["constants"] if call.kind == "add_vector" else ()
