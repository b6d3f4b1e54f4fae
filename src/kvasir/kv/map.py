"""The block map of a cache group: the owner of each block, and whether it is in the prefix cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from kvasir.kv.pool import SCRATCH

UNOWNED, PINNED, SEVERAL, FIRST_ROW = range(4)  # owners


def block_cells(cached: Sequence[int], pins: Iterable[int], tables: Iterable[tuple[int, Sequence[int]]]) -> list[int]:
    """The cell `2 * owner + cached` of each block except scratch (see snapshot.BlockMap).

    cached: for each block id, 1 if the prefix tree holds it. pins: block ids held by pins. tables: (row, block ids).
    """
    owners = [UNOWNED] * len(cached)
    for block in pins:
        owners[block] = PINNED
    for row, ids in tables:
        for block in ids:
            owners[block] = FIRST_ROW + row if owners[block] <= PINNED else SEVERAL
    return [2 * owner + held for owner, held in zip(owners[SCRATCH + 1 :], cached[SCRATCH + 1 :], strict=True)]


def shrink(cells: Sequence[int], most: int) -> tuple[int, list[int]]:
    """Downsamples a map to at most `most` cells. Returns (blocks per cell, cells): each cell is the most common value
    of its blocks, the greatest one on a tie."""
    per_cell = max(1, -(-len(cells) // most))
    if per_cell == 1:
        return 1, list(cells)
    pieces = (Counter(cells[i : i + per_cell]) for i in range(0, len(cells), per_cell))
    return per_cell, [max(piece, key=lambda cell: (piece[cell], cell)) for piece in pieces]


def run_lengths(cells: Iterable[int]) -> tuple[int, ...]:
    """Run-length encoding: (cell, count, cell, count, ...)."""
    return tuple(n for cell, run in groupby(cells) for n in (cell, sum(1 for _ in run)))
