"""The map of a cache group's blocks: whose each of them is, and whether the prefix tree holds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from kvasir.kv.pool import SCRATCH

NOBODY, PINNED, SEVERAL, FIRST_ROW = range(4)  # owners


def block_cells(cached: Sequence[int], pins: Iterable[int], tables: Iterable[tuple[int, Sequence[int]]]) -> list[int]:
    """2 * owner + cached for each block but scratch (snapshot.BlockMap).

    cached: for each block id, 1 where the tree holds it. pins: ids that pins hold. tables: each row with its ids.
    """
    owners = [NOBODY] * len(cached)
    for block in pins:
        owners[block] = PINNED
    for row, ids in tables:
        for block in ids:
            owners[block] = FIRST_ROW + row if owners[block] <= PINNED else SEVERAL
    return [2 * owner + held for owner, held in zip(owners[SCRATCH + 1 :], cached[SCRATCH + 1 :], strict=True)]


def shrink(cells: Sequence[int], most: int) -> tuple[int, list[int]]:
    """(how many become one, at most `most` cells): each the commonest of its piece, the greatest of equally common."""
    per_cell = max(1, -(-len(cells) // most))
    if per_cell == 1:
        return 1, list(cells)
    pieces = (Counter(cells[i : i + per_cell]) for i in range(0, len(cells), per_cell))
    return per_cell, [max(piece, key=lambda cell: (piece[cell], cell)) for piece in pieces]


def run_lengths(cells: Iterable[int]) -> tuple[int, ...]:
    """(cell, count, cell, count, ...)"""
    return tuple(n for cell, run in groupby(cells) for n in (cell, sum(1 for _ in run)))
