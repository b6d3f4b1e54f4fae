"""The facts of one step that layers read: an argument of every forward, complete when it is made.

    tokens    s0 s0 s0 s0 | s1 | s2 s2 | . . .     packed, slice behind slice, filled up to whole tiles
    positions  7  8  9 10 | 42 |  0  1 | 0 0 0

Rows after `num_tokens` only fill up: token 0 at position 0, cached in the scratch block, seen by no one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvasir.layers.kv_cache import SCRATCH_BLOCK, KVCache
from kvasir.layers.rope import Rope
from kvasir.ops.attention import AttentionPlan, Span, plan_attention
from kvasir.ops.gated_delta import StatePlan, plan_states
from kvasir.ops.linear import TILE


@dataclass(frozen=True, slots=True)
class Slice:
    """One sequence's part of a step.

    ids: int32 [count]. start: the position of ids[0]. block_tables: per cache group int32 block ids that
    cover the positions [0, start + count); entries wholly behind a window may be stale. adapter: 0 for none.
    """

    ids: np.ndarray
    start: int
    block_tables: tuple[np.ndarray, ...]
    causal: bool = True
    adapter: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """Letters: T rows, padded to a multiple of 32; the first `num_tokens` are real.

    starts: int64 [slices + 1], the first row of each slice, and num_tokens. slots: per cache group, int64
    [T]. adapters_T: int64, 0 for none. wanted: the names of the hidden states to be kept; `hidden` has them
    after the forward, float32 [T, D] each: "layers.3" after layer 3, "last" for the forward's result.
    """

    tokens_T: Tensor
    positions_T: Tensor
    adapters_T: Tensor
    num_tokens: int
    starts: np.ndarray
    slots: tuple[Tensor, ...]
    spans: tuple[tuple[Span, ...], ...]  # per cache group
    kv: KVCache
    wanted: frozenset[str] = frozenset()
    hidden: dict[str, Tensor] = field(default_factory=dict)
    _made: dict = field(default_factory=dict)

    def attention(self, layer: int, group: int) -> AttentionPlan:
        """The work of a layer's attention; `group` heads share a KV head. Made once for layers of a kind."""
        index = self.kv.group_of(layer)
        if (index, group) not in self._made:
            cache = self.kv.spec[layer]
            self._made[index, group] = plan_attention(
                self.spans[index],
                group=group,
                window=cache.window,
                block_size=self.kv.block_size,
                width=cache.kv_heads * cache.head_dim,
                device=self.tokens_T.device,
            )
        return self._made[index, group]

    def states(self, layer: int) -> StatePlan:
        """The walks through a layer's recurrent states. Made once for layers of a kind."""
        index = self.kv.group_of(layer)
        if index not in self._made:
            self._made[index] = plan_states(
                self.spans[index],
                self.slots[index],
                block_size=self.kv.block_size,
                inputs=self.kv.spec[layer].inputs,
                device=self.tokens_T.device,
            )
        return self._made[index]

    def after_layer(self, layer: int, x_TD: Tensor) -> None:
        """The residual stream after a layer is x."""
        if (name := f"layers.{layer}") in self.wanted:
            self.hidden[name] = x_TD

    def angles(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """cos and sin of every row."""
        if rope not in self._made:
            self._made[rope] = rope.rows(self.positions_T, self.spans[0])
        return self._made[rope]

    def store(self, layer: int, k_TKd: Tensor, v_TKd: Tensor) -> None:
        """Writes every row's keys and values into the cache."""
        self.kv.store(layer, self.slots[self.kv.group_of(layer)], k_TKd, v_TKd)


def make_batch(
    slices: Sequence[Slice], cache: KVCache, device: torch.device | str = "cpu", wanted: frozenset[str] = frozenset()
) -> Batch:
    """Packs the slices, in their order. Slices must not be empty; a block table that is too short, or names
    blocks that are not there, is our own fault (AssertionError) and is noticed before memory is touched."""
    counts = [len(s.ids) for s in slices]
    assert counts and min(counts) > 0, "a step needs slices, and slices need tokens"
    starts = np.concatenate([[0], np.cumsum(counts)])
    total = int(starts[-1])
    size = -(-total // TILE) * TILE

    def tensor(parts: list[np.ndarray], fill: int) -> Tensor:
        packed = np.full(size, fill, np.int64)
        packed[:total] = np.concatenate(parts)
        return torch.from_numpy(packed).to(device)

    positions = [np.arange(s.start, s.end) for s in slices]
    groups = range(len(cache.groups))
    return Batch(
        tokens_T=tensor([s.ids for s in slices], 0),
        positions_T=tensor(positions, 0),
        adapters_T=tensor([np.full(len(s.ids), s.adapter) for s in slices], 0),
        num_tokens=total,
        starts=starts,
        slots=tuple(
            tensor([_slots(s, p, cache, g) for s, p in zip(slices, positions, strict=True)], SCRATCH_BLOCK)
            for g in groups
        ),
        spans=tuple(
            tuple(
                Span(int(row), s.start, len(s.ids), s.causal, s.block_tables[g])
                for row, s in zip(starts, slices, strict=False)
            )
            for g in groups
        ),
        kv=cache,
        wanted=wanted,
    )


def _slots(part: Slice, positions: np.ndarray, cache: KVCache, group: int) -> np.ndarray:
    """Where the slice's tokens lie in the cache: block * block size + place."""
    table, size = part.block_tables[group], cache.block_size
    window = cache.groups[group].window
    seen = table[max(0, part.start - window + 1) // size if window else 0 : -(-part.end // size)]
    assert len(table) * size >= part.end, f"{len(table)} blocks of {size} for {part.end} tokens"
    assert seen.min() > SCRATCH_BLOCK and seen.max() < cache.num_blocks[group], "block ids out of range"
    return table[positions // size].astype(np.int64) * size + positions % size
