"""Low-rank adapters on the device: which calls they change, their matrices, and the launches for them.

The matrices are float32 and found through tables in device memory, so setting or removing an adapter changes no launch.
What is added is computed from a call's input rows as they are stored: of a layer in 16 bits, they may be rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from kvasir.graph.fold import Call
from kvasir.graph.layout import weights_of
from kvasir.layers.adapters import Pairs, Slot, check_adapter
from kvasir.ops.graph import CHOSEN, ROWS, CannotTrace
from kvasir.ops.linear.triton import Delta
from kvasir.ops.linear.triton_low_rank import ENTRY_FIELDS, MAX_RANK, grow, shrink, split
from kvasir.program.trace import Trace

MAX_ADAPTERS = 1 << 12  # as in a program
_KINDS = ("qkv", "product", "linear", "gated")  # of calls that add a delta
_ALIGNED = 4  # float32 values; matrices begin at 16 bytes


@dataclass(frozen=True, slots=True)
class Change:
    """A call that adapters may change. first: the number of its first matrix in the tables. names: of the slots of its
    matrices. rows, cols: of the matrices. apart: whether they have results of their own, as gate and up do."""

    first: int
    names: tuple[str, ...]
    rows: tuple[int, ...]
    cols: int
    apart: bool

    def inner(self, count: int) -> tuple[int, ...]:
        """The shape of the products a x, for `count` rows."""
        return len(self.rows), split(self.cols)[0], count, MAX_RANK

    def delta(self, count: int) -> tuple[int, ...]:
        return (len(self.rows), count, self.rows[0]) if self.apart else (count, sum(self.rows))


def changes_of(trace: Trace, calls: Sequence[Call]) -> dict[int, Change]:
    """The calls that adapters may change, by their `id()`. Raises CannotTrace if a slot's matrix is read by another
    kind of call."""
    found: dict[int, Change] = {}
    number = 0
    for call in calls:
        weights = weights_of(call)
        slots = [trace.slots[id(weight)] for weight in weights if id(weight) in trace.slots]
        if not slots or call.domain == CHOSEN:  # the head has no kernel for adapters
            continue
        if call.kind not in _KINDS or call.domain != ROWS or len(slots) < len(weights):
            raise CannotTrace(f"no Triton kernel for an adapter of {slots[0].name}")
        rows = tuple(weight.rows for weight in weights)
        names = tuple(slot.name for slot in slots)
        found[id(call)] = Change(number, names, rows, weights[0].cols, call.kind == "gated")
        number += len(slots)
    return found


class Adapters:
    """The adapters of a forward. slots: by name. changes: of its calls. tokens: most token rows of a step. All calls
    share the buffers."""

    def __init__(self, slots: Mapping[str, Slot], changes: Mapping[int, Change], tokens: int, device: torch.device):
        self.slots, self.changes, self.device = slots, changes, device
        self.tables = torch.zeros(MAX_ADAPTERS, dtype=torch.int64, device=device)
        sizes = [(prod(change.inner(tokens)), prod(change.delta(tokens))) for change in changes.values()]
        self._inner, self._delta = (
            torch.zeros(max(part, default=0), dtype=torch.float32, device=device)
            for part in (zip(*sizes, strict=True) if sizes else ((), ()))
        )
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def of(cls, trace: Trace, calls: Sequence[Call], tokens: int, device: torch.device) -> Adapters:
        changes = changes_of(trace, calls)
        names = {name for change in changes.values() for name in change.names}
        slots = {slot.name: slot for slot in trace.slots.values() if slot.name in names}
        return cls(slots, changes, tokens, device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tables and buffers, without the adapters' own matrices."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.tables, self._inner, self._delta))

    def set(self, adapter: int, pairs: Pairs) -> None:
        """Replaces the matrix pairs of an adapter id; empty pairs remove the adapter. Raises ValueError for an invalid
        id, slot, shape or rank."""
        check_adapter(adapter, pairs, self.slots)
        if adapter >= MAX_ADAPTERS:
            raise ValueError(f"adapter ids end at {MAX_ADAPTERS - 1}, before {adapter}")
        made = {name: self.slots[name].take(pair) for name, pair in pairs.items()}
        for name, pair in made.items():
            if len(pair.a) > MAX_RANK:
                raise ValueError(f"{name}: a rank of {len(pair.a)}; on a GPU the largest is {MAX_RANK}")
        kept = self._put({name: (pair.a, pair.b) for name, pair in made.items()}) if made else None
        # Steps that were launched before still read the old matrices: the order of the stream keeps them until then.
        self.tables[adapter] = kept[1].data_ptr() if kept else 0
        self._kept.pop(adapter, None)
        if kept:
            self._kept[adapter] = kept

    def _put(self, pairs: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> tuple[Tensor, Tensor]:
        """The matrices on the device, one after the other, and their entries, see ops/linear/triton_low_rank."""
        starts: dict[str, tuple[int, int]] = {}
        size = 0
        for name, (a, b) in pairs.items():
            second = size + _padded(a.size)
            starts[name] = size, second
            size = second + _padded(b.size)
        flat = np.zeros(size, np.float32)
        for name, both in pairs.items():
            for start, matrix in zip(starts[name], both, strict=True):
                flat[start : start + matrix.size] = matrix.reshape(-1)
        matrices = torch.tensor(flat, device=self.device)
        changes = self.changes.values()
        entries = np.zeros((max(change.first + len(change.names) for change in changes), ENTRY_FIELDS), np.int64)
        for change in changes:
            for number, name in enumerate(change.names, change.first):
                if name in pairs:
                    a, b = (matrices.data_ptr() + 4 * start for start in starts[name])
                    entries[number] = a, b, len(pairs[name][0])
        return matrices, torch.tensor(entries, device=self.device)

    def changes_call(self, call: Call) -> bool:
        return id(call) in self.changes

    def launch(self, call: Call, x: Tensor, adapters_T: Tensor) -> Delta:
        """Computes what the adapters of the rows add to a call's products. Valid until the next launch."""
        change, count = self.changes[id(call)], len(x)
        inner, delta = _view(self._inner, change.inner(count)), _view(self._delta, change.delta(count))
        shrink(x, adapters_T, self.tables, change.first, inner)
        grow(inner, adapters_T, self.tables, change.first, delta, change.rows)
        return Delta(delta, adapters_T)


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _view(buffer: Tensor, shape: tuple[int, ...]) -> Tensor:
    return buffer[: prod(shape)].view(shape)
