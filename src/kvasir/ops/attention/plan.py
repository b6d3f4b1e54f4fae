"""Divides a step's attention into work of fixed shapes, on the host, once per step and kind of layer.

    keys       0 ........ 64 ....... 128 ...... 192     tiles of TILE keys, aligned to absolute position
    queries           |q0..q3|q4..q7|q8 . . .|          items of as many query tokens as fill ROWS rows

An item's rows are its query tokens times the heads that share a KV head, padded to ROWS. Items of sequences with only
one item (decoding) are computed together; the items of a longer sequence are computed one after another, over keys that
are read once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvasir.ops.attention.sizes import BUDGET, TILE, first_in_window
from kvasir.plan import Work

ROWS = 16


@dataclass(frozen=True, slots=True)
class Pass:
    """Items that are computed together: u of them, over n tiles from tile `first` of their part's keys.

    rows: int64 [u * tokens], the token rows of the queries; items are padded by repeating their last row. keep: which
    of these rows are results, None for all. targets: the token rows of the results. blocked: bool [u, n, 1, ROWS,
    TILE], True for masked keys. positions: int64 [u, tokens], of the queries. start: int64 [u], of an item's first key.
    """

    first: int
    count: int
    rows: Tensor
    keep: Tensor | None
    targets: Tensor
    blocked: Tensor
    positions: Tensor
    start: Tensor


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Keys that are read together, and the passes over them. s sequences.

    blocks: int64 [s, blocks]. outside: bool [s, n, 1, TILE, 1], True for keys that no row of the part may use.
    """

    blocks: Tensor
    outside: Tensor
    passes: tuple[Pass, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The attention of one step, for layers with the same block table, window and number of heads per KV head.

    tokens: query tokens per item. group: heads per KV head. rows: rows per item.
    """

    parts: tuple[AttentionPart, ...]
    tokens: int
    group: int
    rows: int


def plan_attention(
    works: Sequence[Work],
    starts: Sequence[int] | np.ndarray,
    tables: Sequence[np.ndarray] | np.ndarray,
    *,
    group: int,
    window: int,
    block_size: int,
    width: int,
    device: torch.device,
    distance: int = 0,
) -> AttentionPlan:
    """starts: the first token row of each work. tables: int32 block ids for this kind of layer, indexed by a work's
    row. group: query heads per KV head. window: maximum keys that a row attends to, itself included; 0 for all, -n for
    those in its chunk of n.

    width: kv_heads * head_dim, for the memory bound. block_size divides TILE or is a multiple of it. distance: how far
    from a row of an indivisible work the keys that it attends to may lie, on both sides; 0 for any distance.
    """
    firsts = {work.row: int(start) for work, start in zip(works, starts, strict=False)}
    planner = _Planner(firsts, tables, group, window, block_size, device, distance)
    short = sorted((w for w in works if w.count <= planner.tokens), key=planner.num_tiles)
    parts = [planner.together(batch) for batch in planner.batches(short, width)]
    parts += [planner.alone(work) for work in works if work.count > planner.tokens]
    return AttentionPlan(tuple(parts), planner.tokens, group, planner.rows)


class _Planner:
    """firsts: the first token row of each work, by the work's row."""

    def __init__(
        self,
        firsts: Mapping[int, int],
        tables: Sequence[np.ndarray] | np.ndarray,
        group: int,
        window: int,
        block_size: int,
        device: torch.device,
        distance: int,
    ):
        self.firsts, self.tables, self.distance = firsts, tables, distance
        assert TILE % block_size == 0 or block_size % TILE == 0, f"block size {block_size}"
        self.tokens = max(1, ROWS // group)
        self.rows = -(-self.tokens * group // ROWS) * ROWS
        self.group, self.window, self.block_size, self.device = group, window, block_size, device
        self.unit = max(TILE, block_size)  # keys are read in whole tiles and whole blocks

    def low(self, work: Work) -> int:
        """The first key that any row of the work attends to."""
        return max(0, first_in_window(work.start, self.window))

    def seen(self, start: int, end: int, work: Work) -> tuple[int, int]:
        """The keys that the rows [start, end) of a work attend to."""
        if self.distance:
            return max(0, start - self.distance), min(end + self.distance, work.end)
        return max(0, first_in_window(start, self.window)), work.end if work.indivisible else end

    def first_unit(self, work: Work) -> int:
        return self.low(work) // self.unit

    def num_units(self, work: Work) -> int:
        return -(-work.end // self.unit) - self.first_unit(work)

    def num_tiles(self, work: Work) -> int:
        return self.num_units(work) * self.unit // TILE

    def batches(self, works: Sequence[Work], width: int) -> list[list[Work]]:
        """Groups works, given in ascending size, so that each group, padded to its largest, stays within BUDGET."""
        batches: list[list[Work]] = []
        for work in works:
            size = self.num_tiles(work) * (2 * TILE + 2 * self.rows) * width
            if not batches or (len(batches[-1]) + 1) * size > BUDGET:
                batches.append([])
            batches[-1].append(work)
        return batches

    def together(self, works: Sequence[Work]) -> AttentionPart:
        """One item per work, in one pass."""
        units = max(self.num_units(work) for work in works)
        tiles = units * self.unit // TILE
        offsets = np.array([self.first_unit(work) * self.unit for work in works])
        items = [(work, work.start, work.end) for work in works]
        return self._part(works, units, offsets, (self._pass(items, 0, tiles, offsets),))

    def alone(self, work: Work) -> AttentionPart:
        """All items of one work, one pass each, over the tiles that the item's rows attend to."""
        offset = self.first_unit(work) * self.unit
        passes = []
        for start in range(work.start, work.end, self.tokens):
            end = min(start + self.tokens, work.end)
            low, high = self.seen(start, end, work)
            first, stop = (low - offset) // TILE, -(-(high - offset) // TILE)
            base = np.array([offset + first * TILE])
            passes.append(self._pass([(work, start, end)], first, stop - first, base))
        return self._part([work], self.num_units(work), np.array([offset]), tuple(passes))

    def _part(self, works: Sequence[Work], units: int, offsets: np.ndarray, passes: tuple[Pass, ...]) -> AttentionPart:
        blocks = np.stack([self._blocks(work, units) for work in works])
        keys = offsets[:, None] + np.arange(units * self.unit)
        low, end = (np.array([f(work) for work in works])[:, None] for f in (self.low, lambda s: s.end))
        outside = ((keys < low) | (keys >= end)).reshape(len(works), -1, 1, TILE, 1)
        return AttentionPart(self._tensor(blocks), self._tensor(outside), passes)

    def _blocks(self, work: Work, units: int) -> np.ndarray:
        """The block ids for `units` units of keys; block 0 replaces blocks without a visible key."""
        per_unit = self.unit // self.block_size
        ids = np.zeros(units * per_unit, np.int64)
        first = self.first_unit(work) * per_unit
        seen_from, seen_to = self.low(work) // self.block_size, -(-work.end // self.block_size)
        ids[seen_from - first : seen_to - first] = self.tables[work.row][seen_from:seen_to]
        return ids

    def _pass(self, items: list[tuple[Work, int, int]], first: int, count: int, base: np.ndarray) -> Pass:
        """items: (work, start, end) of the query positions. base: for each item, the position of its first key."""
        offsets = np.arange(self.tokens)
        starts, ends = (np.array([item[i] for item in items])[:, None] for i in (1, 2))
        positions = np.minimum(starts + offsets, ends - 1)  # [u, tokens]
        real = starts + offsets < ends
        rows = positions + np.array([self.firsts[work.row] - work.start for work, _, _ in items])[:, None]
        causal = np.array([not work.indivisible for work, _, _ in items])[:, None]
        work_ends = np.array([work.end for work, _, _ in items])[:, None]
        high = np.where(causal, positions + 1, work_ends) * real
        low = first_in_window(positions, self.window)
        if self.distance:
            low, high = positions - self.distance, np.minimum(high, positions + self.distance + 1)
        keys = base[:, None, None] + np.arange(count * TILE)
        hidden = (keys < low[..., None]) | (keys >= high[..., None])  # [u, tokens, keys]
        all_real = bool(real.all())
        return Pass(
            first,
            count,
            self._tensor(rows.reshape(-1)),
            None if all_real else self._tensor(np.flatnonzero(real)),
            self._tensor(rows[real]),
            self._blocked(hidden),
            self._tensor(positions),
            self._tensor(base),
        )

    def _blocked(self, hidden: np.ndarray) -> Tensor:
        """Expands the mask per query token to one per row: repeated for the heads of the group, True in padding
        rows."""
        items, tokens, keys = hidden.shape
        blocked = np.ones((items, self.rows, keys), bool)
        blocked[:, : tokens * self.group] = np.repeat(hidden, self.group, axis=1)
        tiled = blocked.reshape(items, self.rows, keys // TILE, TILE).transpose(0, 2, 1, 3)
        return self._tensor(np.ascontiguousarray(tiled)[:, :, None])

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)
