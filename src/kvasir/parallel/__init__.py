"""Ranks that share one model: what each holds of it, and the one thing that they do together.

A sum over ranks is never left to a library, whose order depends on the message and on the number of ranks. A rank reads
what all have brought (`Mesh.meet`) and joins it by itself, in the order that one rank alone has:

    tree_sum        sums that are cut in segments: the balanced tree of the kernels continues over the ranks
    side_by_side    columns of a result
    picked          rows by id, each from the rank that has its part of the table
    ExpertShare     rows of experts, each from the rank that has the expert, or sums of such rows

A cut has a power of two of parts. Where it has fewer parts than there are ranks, neighbouring ranks hold the same part
and compute the same; of one part, all ranks hold all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

MAX_RANKS = 8  # as many as a sum has segments at most


@dataclass(frozen=True, slots=True)
class Cut:
    """Things 0 to borders[-1] in parts: part p is [borders[p], borders[p + 1])."""

    borders: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.borders[-1]

    @property
    def parts(self) -> int:
        return len(self.borders) - 1

    def range(self, part: int) -> tuple[int, int]:
        return self.borders[part], self.borders[part + 1]


def cut(size: int, parts: int, unit: int = 1) -> Cut:
    """As even as runs of `unit` allow."""
    units = -(-size // unit)
    return Cut(tuple(min(size, units * p // parts * unit) for p in range(parts + 1)))


class Mesh:
    """One of `size` ranks, and its way to the others. This one is alone."""

    rank = 0
    size = 1

    def part(self, parts: int) -> int:
        """Which of the parts this rank holds."""
        return self.rank * parts // self.size

    def most_parts(self, fits: Callable[[int], bool]) -> int:
        """The greatest power of two, up to the number of ranks, that fits; 1 always does."""
        parts = self.size
        while parts > 1 and not fits(parts):
            parts //= 2
        return parts

    def meet(self, mine: np.ndarray) -> Sequence[np.ndarray]:
        """What every rank brings, by rank, once all are there. All call it in the same order. What comes back stays
        as it is while the caller changes what it brought."""
        return (mine,)


SOLO = Mesh()


def each_part(everyones: Sequence[np.ndarray], parts: int) -> Sequence[np.ndarray]:
    """Of each part, what its first holder has."""
    return everyones[:: len(everyones) // parts]


def tree_sum(everyones: Sequence[np.ndarray], parts: int) -> np.ndarray:
    """The parts' sums joined by a balanced tree, as kernels join segments: neighbours first."""
    sums = each_part(everyones, parts)
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def side_by_side(everyones: Sequence[np.ndarray], parts: int) -> np.ndarray:
    """[rows, all columns] of the parts' columns."""
    return np.concatenate(each_part(everyones, parts), axis=1)


def picked(everyones: Sequence[np.ndarray], ids: np.ndarray, table: Cut) -> np.ndarray:
    """Row i from the part of the table that has ids[i]. To add zeros to it would turn -0 into 0."""
    part = np.searchsorted(table.borders, ids, side="right") - 1
    return np.stack(each_part(everyones, table.parts))[part, np.arange(len(ids))]


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """How ranks share a mixture's experts: each has some of them, or a part of each one's sums.

    experts: their ids. parts: in how many each expert's last sum is cut.
    """

    mesh: Mesh
    experts: Cut
    parts: int

    @property
    def held(self) -> tuple[int, int]:
        """The ids of the experts that this rank has."""
        return self.experts.range(self.mesh.part(self.experts.parts))

    def complete(self, rows_SD: np.ndarray, begins: np.ndarray) -> None:
        """Completes rows that go to experts, before they are weighted. They are sorted by expert; those of expert e
        begin at begins[e], int64 [experts + 1]."""
        everyones = self.mesh.meet(rows_SD)
        if self.parts > 1:
            rows_SD[:] = tree_sum(everyones, self.parts)
        for part, theirs in enumerate(each_part(everyones, self.experts.parts)):
            first, last = (begins[e] for e in self.experts.range(part))
            if self.experts.parts > 1:
                rows_SD[first:last] = theirs[first:last]
