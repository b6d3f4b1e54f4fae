"""How a step walks through recurrent states: decided on the host, once a step and kind of layer.

    blocks    |. . . . . . . .|. . . . . . . .|. . . .         a cache block holds the state at its start
    a walk            start ->|s s n n n n n n|n n n           n: rows of this step; s: tokens of earlier ones
    piece                      0               1

A row at position p is reached from the state at the start of p's block, one token after the other. A row that opens
a block comes from the block before, whose end is the state that the new block keeps. So all walks begin at the start
of a block, and go through their blocks together: piece j is the j-th block of each walk that is so long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvasir.ops.attention.plan import Span

BUDGET = 1 << 24  # numbers of the blocks' rows that are read at once


@dataclass(frozen=True, slots=True)
class Piece:
    """One block of each of the first n walks of a part.

    blocks: int64 [n]. opened: int64, the walks whose block is new: its state is still to be stored. counts: of each
    place in the block how many walks have a token there, the longest come first. first: the place of the first
    result. results: int64, the rows of this step by walk * len(counts) + place; targets: their token rows.
    """

    blocks: Tensor
    opened: Tensor
    counts: tuple[int, ...]
    first: int
    results: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Walks that are gone together. fresh: bool [walks], True where it begins at position 0, with nothing behind."""

    fresh: Tensor
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Work for layers of one block table. slots: int64 [T], block * block size + place of every token row."""

    parts: tuple[Part, ...]
    slots: Tensor
    block_size: int


def plan_states(
    spans: Sequence[Span], slots_T: Tensor, *, block_size: int, inputs: int, device: torch.device
) -> StatePlan:
    """inputs: numbers in a token's row, for the memory bound. Spans are causal."""
    assert all(span.causal for span in spans), "a recurrent layer cannot look ahead"
    ordered = sorted(spans, key=lambda span: _low(span, block_size) - span.end)
    size = max(1, BUDGET // (block_size * inputs))
    batches = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    return StatePlan(tuple(_part(batch, block_size, device) for batch in batches), slots_T, block_size)


def _low(span: Span, size: int) -> int:
    """Where the walk begins: the start of the first row's block, or, where that row opens it, of the one before."""
    return max(0, span.start - 1) // size * size


def _part(spans: Sequence[Span], size: int, device: torch.device) -> Part:
    fresh = np.array([span.start == 0 for span in spans])
    return Part(torch.from_numpy(fresh).to(device), tuple(_pieces(spans, size, device)))


def _pieces(spans: Sequence[Span], size: int, device: torch.device) -> Iterator[Piece]:
    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    lows, starts, ends, rows = (
        np.array(x) for x in zip(*((_low(s, size), s.start, s.end, s.row) for s in spans), strict=True)
    )
    for begin in range(0, int((ends - lows).max()), size):
        here = (lows + begin)[ends - lows > begin]  # per walk the position of its block's first token
        n = len(here)
        places = np.arange(min(size, int((ends[:n] - here).max())))
        positions = here[:, None] + places
        real = positions < ends[:n, None]
        new = real & (positions >= starts[:n, None])
        walks, at = np.nonzero(new)
        yield Piece(
            blocks=tensor(np.array([span.table[p // size] for span, p in zip(spans, here, strict=False)])),
            opened=tensor(np.flatnonzero(new[:, 0])),
            counts=tuple(int(c) for c in real.sum(0)),
            first=int(at.min(initial=len(places))),
            results=tensor(walks * len(places) + at),
            targets=tensor((rows[:n, None] + positions - starts[:n, None])[new]),
        )
