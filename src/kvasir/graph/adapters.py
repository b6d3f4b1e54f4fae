"""Adapters on the device: which are set, and the launches for them.

What adapters change is found through tables in device memory, so setting or removing one changes no launch. What is
added is computed from a call's input rows as they are stored: of a layer in 16 bits, they may be rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from kvasir.graph.adapter_packing import PackedAdapter
from kvasir.graph.adapter_places import Change, Places
from kvasir.graph.fold import Call
from kvasir.layers.adapters import check_id
from kvasir.ops.collective.triton import side_by_side
from kvasir.ops.embedding.triton_changes import change_lookup
from kvasir.ops.graph import CHOSEN, ROWS
from kvasir.ops.launch import call as call_on_stream
from kvasir.ops.linear.triton import Delta
from kvasir.ops.linear.triton_in_effect import LEVELS, TABLE_FIELDS, InEffect, find_in_effect
from kvasir.ops.linear.triton_low_rank import MAX_RANK, grow, shrink
from kvasir.ops.norm.triton_changes import change_norm
from kvasir.parallel import cut

MAX_ADAPTERS = 1 << 12  # as in a program
CHUNK = 512  # rows of a product whose changes are computed at a time


class Adapters:
    """The adapters of a forward, and buffers that all its calls share. tokens, chosen: most rows of a step."""

    def __init__(self, places: Places, *, tokens: int, chosen: int, device: torch.device):
        self.places = places
        self.tables = torch.zeros(MAX_ADAPTERS, TABLE_FIELDS, dtype=torch.int64, device=device)

        def zeros(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(count, *shape, dtype=dtype, device=device)

        most = {ROWS: tokens, CHOSEN: chosen}
        self._found = {
            domain: InEffect(
                zeros(count, LEVELS, dtype=torch.int32), zeros(count, LEVELS), zeros(count, dtype=torch.int32)
            )
            for domain, count in most.items()
        }
        changes = [(change, min(most[change.domain], CHUNK)) for change in places.calls.values()]
        size = max((prod(change.delta(count)) for change, count in changes), default=0)
        self._delta, self._factors = zeros(size), zeros(size)
        self._inner = zeros(
            max((prod(change.inner(count)) for change, count in changes), default=0) * LEVELS * MAX_RANK
        )
        # Where ranks share a sum: the inputs that they gather, and deltas that change nothing.
        shared = [(change, count) for change, count in changes if change.shared]
        self._gathered, self._inputs = (zeros(max((c.cols * n for c, n in shared), default=0)) for _ in range(2))
        self._nothing = zeros(max((prod(change.delta(n)) for change, n in shared if not change.leads), default=0))
        self._nothing.neg_()
        self._set: dict[int, PackedAdapter] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the tables and buffers, without the adapters' own matrices."""
        found = [part for effect in self._found.values() for part in effect]
        own = self._delta, self._factors, self._inner, self._gathered, self._inputs, self._nothing
        tensors = (self.tables, *own, *found)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def set(self, adapter: int, packed: PackedAdapter | None) -> None:
        """Sets what an adapter id stands for; None removes it. Raises ValueError for an invalid id."""
        check_id(adapter, MAX_ADAPTERS)
        # Steps that were launched before still read the old matrices: the order of the stream keeps them until then.
        self.tables[adapter, 0] = packed.entries.data_ptr() if packed else 0
        self.tables[adapter, 1] = packed.flags if packed else 0
        self._set.pop(adapter, None)
        if packed:
            self._set[adapter] = packed

    def change_chosen(self, adapters: Iterable[int]) -> bool:
        """Whether one of them changes something of the rows of logits."""
        return any(adapter in self._set and self._set[adapter].chosen for adapter in adapters)

    # -- launches

    def find(self, adapters: Tensor, rows_T: Tensor, positions_T: Tensor, at: Tensor | None = None) -> InEffect:
        """The adapters in effect in all tokens, or in those `at` these numbers, of which the logits are computed.
        adapters: of the rows."""
        found = self._found[ROWS].rows(0, len(rows_T)) if at is None else self._found[CHOSEN].rows(0, len(at))
        find_in_effect(rows_T, positions_T, adapters, self.tables, found, at)
        return found

    def deltas(self, call: Call, x: Tensor, effect: InEffect) -> Iterator[tuple[slice, Delta | None]]:
        """How adapters change the products of a call, for some rows at a time. Each is valid until the next."""
        change = self.places.calls.get(id(call))
        if change is None:
            yield slice(None), None
            return
        for first in range(0, len(x), CHUNK):
            rows = slice(first, min(first + CHUNK, len(x)))
            yield rows, self._launch(change, x[rows], effect.rows(rows.start, rows.stop))

    def change_lookup(self, call: Call, ids: Tensor, out: Tensor, effect: InEffect) -> None:
        """Changes the rows that a call has looked up."""
        if (place := self.places.others.get(id(call))) is not None:
            table = call.takes["weight"]
            change_lookup(ids, effect, self.tables, place, out, table.rows, table.dtype, call.takes["first"])

    def change_norm(self, call: Call, x: Tensor, out: Tensor, effect: InEffect) -> None:
        """Computes a norm again for the rows whose adapters replace its weights. x, out: [rows, width]."""
        if (place := self.places.others.get(id(call))) is not None:
            takes = call.takes
            change_norm(x, effect, self.tables, place, out, takes["eps"], takes.get("norm_bias") is not None)

    def _launch(self, change: Change, x: Tensor, effect: InEffect) -> Delta:
        parts, segments, count = change.inner(len(x))
        inner = _view(self._inner, (parts, segments, LEVELS, count, MAX_RANK))
        delta, factors = (_view(buffer, change.delta(count)) for buffer in (self._delta, self._factors))
        if change.shared:
            x = self._whole(x, change.cols, *change.shared)
        shrink(x, effect, self.tables, change.first, inner)
        grow(x, inner, effect, self.tables, change.first, delta, factors, change.rows, change.dtype)
        return Delta(delta if change.leads else _view(self._nothing, change.delta(count)), factors, effect.applied_T)

    def _whole(self, x: Tensor, cols: int, mesh: Any, parts: int) -> Tensor:
        """Input rows with the columns of all ranks."""
        mine = x.view(torch.float32 if x.element_size() == 4 else torch.int16)
        everyones = self._gathered.view(mine.dtype)[: len(x) * cols].view(parts, -1)
        call_on_stream(mesh.gather_into, everyones, mine, parts, bytes=2 * everyones.numel() * mine.element_size())
        whole = self._inputs.view(mine.dtype)[: len(x) * cols].view(len(x), cols)
        side_by_side(everyones, whole, cut(cols, parts))
        return whole.view(x.dtype)


def _view(buffer: Tensor, shape: tuple[int, ...]) -> Tensor:
    return buffer[: prod(shape)].view(shape)
