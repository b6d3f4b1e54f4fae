"""Plans a step's walks through recurrent states, on the host, once per step and kind of layer.

    blocks    |. . . . . . . .|. . . . . . . .|. . . .         a cache block holds the state at its start
    a walk            start ->|s s n n n n n n|n n n           n: rows of this step; s: tokens of earlier ones
    stage                      0               1

A row at position p is computed from the state at the start of p's block, one token after the other. A row that opens a
block continues from the previous block, whose final state becomes the new block's initial state. So all walks begin at
the start of a block and go through their blocks together: stage j is the j-th block of each walk that is long enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvasir.plan import Work

BUDGET = 1 << 24  # maximum elements of the blocks' rows that are read at once


@dataclass(frozen=True, slots=True)
class Stage:
    """One block of each of the first n walks of a part.

    blocks: int64 [n]. opened: int64, the walks whose block is new, so that its state must be stored. counts: for each
    place in the block, the number of walks with a token there; walks are sorted longest first. first: the place of the
    first result. results: int64, the rows of this step as walk * len(counts) + place; targets: their token rows.
    """

    blocks: Tensor
    opened: Tensor
    counts: tuple[int, ...]
    first: int
    results: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True)
class WalkGroup:
    """Walks that are computed together. fresh: bool [walks], True for walks that begin at position 0, from a zero
    state."""

    fresh: Tensor
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class StatePlan:
    """The walks of a step, for layers with the same block table. slots: int64 [T], block * block size + offset of every
    token row."""

    groups: tuple[WalkGroup, ...]
    slots: Tensor
    block_size: int


def plan_states(
    works: Sequence[Work],
    starts: Sequence[int] | np.ndarray,
    tables: Sequence[np.ndarray] | np.ndarray,
    slots_T: Tensor,
    *,
    block_size: int,
    inputs: int,
    device: torch.device,
) -> StatePlan:
    """starts, tables: as in plan_attention. inputs: elements of a token's row, for the memory bound."""
    assert not any(work.indivisible for work in works), "a recurrent layer cannot attend to later tokens"
    walks = [Walk(work, int(first), tables[work.row]) for work, first in zip(works, starts, strict=False)]
    walks.sort(key=lambda walk: walk.low(block_size) - walk.work.end)
    size = max(1, BUDGET // (block_size * inputs))
    groups = [walks[i : i + size] for i in range(0, len(walks), size)]
    return StatePlan(tuple(_group(group, block_size, device) for group in groups), slots_T, block_size)


class Walk(NamedTuple):
    """The walk of a work: its first token row, and the block ids of its row."""

    work: Work
    first: int
    table: np.ndarray

    def low(self, size: int) -> int:
        """The position where the walk begins: the start of the first row's block or, if that row opens the block, of
        the previous one."""
        return max(0, self.work.start - 1) // size * size


def _group(walks: Sequence[Walk], size: int, device: torch.device) -> WalkGroup:
    fresh = np.array([walk.work.start == 0 for walk in walks])
    return WalkGroup(torch.from_numpy(fresh).to(device), tuple(_stages(walks, size, device)))


def _stages(walks: Sequence[Walk], size: int, device: torch.device) -> Iterator[Stage]:
    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    lows, starts, ends, rows = (
        np.array(x) for x in zip(*((w.low(size), w.work.start, w.work.end, w.first) for w in walks), strict=True)
    )
    for begin in range(0, int((ends - lows).max()), size):
        here = (lows + begin)[ends - lows > begin]  # for each walk, the position of its block's first token
        n = len(here)
        places = np.arange(min(size, int((ends[:n] - here).max())))
        positions = here[:, None] + places
        real = positions < ends[:n, None]
        new = real & (positions >= starts[:n, None])
        found, at = np.nonzero(new)
        yield Stage(
            blocks=tensor(np.array([walk.table[p // size] for walk, p in zip(walks, here, strict=False)])),
            opened=tensor(np.flatnonzero(new[:, 0])),
            counts=tuple(int(c) for c in real.sum(0)),
            first=int(at.min(initial=len(places))),
            results=tensor(found * len(places) + at),
            targets=tensor((rows[:n, None] + positions - starts[:n, None])[new]),
        )
