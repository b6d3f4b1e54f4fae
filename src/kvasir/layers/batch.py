"""The inputs of one step that layers read: an argument of every forward, complete once created.

    tokens    s0 s0 s0 s0 | s1 | s2 s2 | . . .     packed, work after work, padded to whole tiles
    positions  7  8  9 10 | 42 |  0  1 | 0 0 0

Rows from `num_tokens` on are padding: token 0 at position 0, cached in the scratch block, attended to by no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from kvasir.caches import State
from kvasir.layers.kv_cache import SCRATCH_BLOCK, KVCache
from kvasir.layers.rope import Rope
from kvasir.layers.rope_tensors import angles_of
from kvasir.layers.rows import RowArrays
from kvasir.ops.attention.plan import AttentionPlan, plan_attention
from kvasir.ops.attention.relative import Relative
from kvasir.ops.attention.weights import attention_weights
from kvasir.ops.gated_delta.plan import StatePlan, plan_states
from kvasir.ops.indexer.body import selected_weights
from kvasir.ops.indexer.plan import Walked, walked_rows
from kvasir.ops.linear import TILE
from kvasir.plan import Work


class InputBuffers:
    """Buffers for the token rows of any step, at a fixed address: int64 [2 + groups, rows], with the ids, the positions
    and, per cache group, the slots."""

    def __init__(self, max_tokens: int, groups: int, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        rows = -(-max_tokens // TILE) * TILE
        self._host = torch.zeros((2 + groups, rows), dtype=torch.int64)
        self._there = self._host if self.device.type == "cpu" else self._host.to(self.device)

    @property
    def host(self) -> np.ndarray:
        """The host array that a step is written to before `put`."""
        return self._host.numpy()

    def put(self, size: int) -> Tensor:
        """The first `size` columns on the device; a copy unless the device is the CPU."""
        if self._there is not self._host:
            self._there[:, :size].copy_(self._host[:, :size])
        return self._there[:, :size]


@dataclass(frozen=True, slots=True)
class Batch:
    """Letters: T rows, padded to a multiple of 32; the first `num_tokens` are real.

    works: the work of each sequence in the step. starts: int64 [works + 1], the first token row of each work, then
    num_tokens. tables: per cache group, the block ids by row of the runner. slots: per cache group, int64 [T].
    types_T: int64, 1 in a second text, else 0. wanted: the names of the outputs to keep,
    which `output` returns per work after the forward: hidden states, "layers.3" after layer 3, "last" for the forward's
    result, and "attention.3", the attention weights of layer 3.
    """

    tokens_T: Tensor
    positions_T: Tensor
    types_T: Tensor
    num_tokens: int
    works: tuple[Work, ...]
    starts: np.ndarray
    tables: tuple[np.ndarray, ...]
    slots: tuple[Tensor, ...]
    kv: KVCache
    wanted: frozenset[str] = frozenset()
    hidden: dict[str, Tensor] = field(default_factory=dict)  # float32 [T, D]
    _weights: dict[tuple[int, str], Tensor] = field(default_factory=dict)  # by index of the work and name
    _made: dict = field(default_factory=dict)

    def attention(self, layer: int, group: int) -> AttentionPlan:
        """The attention plan of a layer; `group` query heads share a KV head. Computed once for all layers of the same
        kind."""
        kind, index = self.kv.spec[layer], self.kv.group_of(layer)
        key = index, kind.window, kind.distance, kind.causal, kind.width, group
        if key not in self._made:
            self._made[key] = plan_attention(
                [replace(work, indivisible=False) for work in self.works] if kind.causal else self.works,
                self.starts,
                self.tables[index],
                group=group,
                window=kind.window,
                distance=kind.distance,
                block_size=self.kv.block_size,
                width=kind.width // 2,
                device=self.tokens_T.device,
            )
        return self._made[key]

    def states(self, layer: int) -> StatePlan:
        """The walks through a layer's recurrent states. Computed once for all layers of the same kind."""
        index = self.kv.group_of(layer)
        if index not in self._made:
            self._made[index] = plan_states(
                self.works,
                self.starts,
                self.tables[index],
                self.slots[index],
                block_size=self.kv.block_size,
                inputs=cast(State, self.kv.spec[layer]).inputs,
                device=self.tokens_T.device,
            )
        return self._made[index]

    def walked(self, layer: int) -> tuple[Walked, ...]:
        """The rows of each work and their blocks, for layers that select tokens. Computed once for all of a group."""
        index = self.kv.group_of(layer)
        if (key := ("walked", index)) not in self._made:
            self._made[key] = walked_rows(self.works, self.starts, self.tables[index], self.kv.block_size)
        return self._made[key]

    def after_layer(self, layer: int, x_TD: Tensor) -> None:
        """Keeps x, the residual stream after a layer, if it is wanted."""
        if (name := f"layers.{layer}") in self.wanted:
            self.hidden[name] = x_TD

    def keep(self, name: str, x_TD: Tensor) -> None:
        """Keeps rows that a task is pooled from."""
        self.hidden[name] = x_TD

    def note_weights(
        self,
        model_layer: int,
        layer: int,
        q_THd: Tensor,
        k_TKd: Tensor | None,
        scale: float,
        softcap: float,
        sinks_H: Tensor | None,
        relative: Relative | None = None,
    ) -> None:
        """Computes a layer's attention weights from its queries q, if they are wanted. Its keys must be in the
        cache of `layer`; k: those of the step, which only tables of positions need."""
        if (name := f"attention.{model_layer}") not in self.wanted:
            return
        table, kind = self.tables[self.kv.group_of(layer)], self.kv.spec[layer]
        for at, work in enumerate(self.works):
            if name in work.want_hidden:
                rows = slice(self.starts[at], self.starts[at + 1])
                self._weights[at, name] = attention_weights(
                    q_THd[rows], self.kv.k(layer), work, table[work.row],
                    window=kind.window, distance=kind.distance, scale=scale, softcap=softcap, sinks_H=sinks_H,
                    relative=relative, k_nKd=None if k_TKd is None else k_TKd[rows],
                )  # fmt: skip

    def select(self, selected_TS: Tensor) -> None:
        """Keeps the positions that an indexer selected, int32 [T, top_k], for the layers up to the next indexer."""
        self._made["selected"] = selected_TS

    def selected(self) -> Tensor:
        """The positions that the last indexer selected."""
        return self._made["selected"]

    def note_selected_weights(
        self, model_layer: int, layer: int, q_THd: Tensor, selected_TS: Tensor, scale: float
    ) -> None:
        """As `note_weights`, for a layer that attends to selected positions only."""
        if (name := f"attention.{model_layer}") not in self.wanted:
            return
        for at, (work, walked) in enumerate(zip(self.works, self.walked(layer), strict=True)):
            if name in work.want_hidden:
                rows = slice(self.starts[at], self.starts[at + 1])
                self._weights[at, name] = selected_weights(
                    q_THd[rows], self.kv.k(layer), walked, selected_TS[rows], scale
                )

    def output(self, at: int, name: str) -> Tensor:
        """The named output of the work with index `at`: hidden rows [n, D] or attention weights [n, H, end],
        float32."""
        found = self._weights.get((at, name))
        return self.hidden[name][self.starts[at] : self.starts[at + 1]] if found is None else found

    def angles(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """cos and sin for every row."""
        if rope not in self._made:
            self._made[rope] = angles_of(rope, self.positions_T, self.works)
        return self._made[rope]

    def store(self, layer: int, k_TKd: Tensor, v_TKd: Tensor) -> None:
        """Writes every row's keys and values into the cache."""
        self.kv.store(layer, self.slots[self.kv.group_of(layer)], k_TKd, v_TKd)


def make_batch(
    works: Sequence[Work],
    rows: RowArrays,
    cache: KVCache,
    wanted: frozenset[str] = frozenset(),
    inputs: InputBuffers | None = None,
) -> Batch:
    """Packs the works in order; each has a different row of the runner. inputs: buffers to fill, by default new ones.

    Asserts that works are not empty and that block tables are long enough and name existing blocks, before any cache
    memory is written.
    """
    counts = [work.count for work in works]
    assert counts and min(counts) > 0, "a step needs works, and works need tokens"
    starts = np.concatenate([[0], np.cumsum(counts)])
    total = int(starts[-1])
    size = -(-total // TILE) * TILE
    inputs = inputs or InputBuffers(total, len(cache.groups), cache.device)
    host = inputs.host
    host[:, total:size] = 0  # padding: its slots are in the scratch block
    types = np.zeros(size, np.int64)
    for work, begin in zip(works, starts, strict=False):
        mine, positions = host[:, begin : begin + work.count], np.arange(work.start, work.end)
        mine[0], mine[1] = rows.ids[work.row, work.start : work.end], positions
        if second := rows.seconds[work.row]:
            types[begin : begin + work.count] = positions >= second
        for group, table in enumerate(rows.tables):
            mine[2 + group] = _slots(work, table[work.row], positions, cache, group)
    tokens_T, positions_T, *slots = inputs.put(size)
    types_T = torch.from_numpy(types).to(cache.device)
    return Batch(
        tokens_T,
        positions_T,
        types_T,
        total,
        tuple(works),
        starts,
        rows.tables,
        tuple(slots),
        cache,
        wanted,
    )


def _slots(work: Work, table: np.ndarray, positions: np.ndarray, cache: KVCache, group: int) -> np.ndarray:
    """The work's slots in the cache: block * block size + offset in the block."""
    size = cache.block_size
    seen = table[cache.groups[group].kind.first(work.start, size) : -(-work.end // size)]
    assert len(table) * size >= work.end, f"{len(table)} blocks of {size} for {work.end} tokens"
    assert seen.min() > SCRATCH_BLOCK and seen.max() < cache.num_blocks[group], "block ids out of range"
    return table[positions // size].astype(np.int64) * size + positions % size
