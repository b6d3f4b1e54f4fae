"""Ranks that share one model: the part that each rank holds, and their only collective operation.

No library computes sums over ranks, since its order would depend on the size of the message and on the number of ranks.
Each rank reads the arrays of all ranks (`Mesh.meet`) and combines them itself, in the order of a single rank:

    tree_sum        sums that are split into segments: the kernels' balanced tree continues over the ranks
    side_by_side    columns of a result
    picked          rows by id, each from the rank that holds its part of the table
    ExpertShare     rows of experts, each from the rank that holds the expert, or sums of such rows

The number of parts of a cut is a power of two. If there are fewer parts than ranks, neighboring ranks hold the same
part and compute the same; a single part is held by all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

MAX_RANKS = 8  # a sum has at most as many segments
MAX_STAGES = 16

Array = TypeVar("Array", bound=Any)  # NumPy's, or a tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """Items 0 to borders[-1] in parts: part p is [borders[p], borders[p + 1])."""

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
    """Cuts `size` items into parts as even as runs of `unit` items allow."""
    units = -(-size // unit)
    return Cut(tuple(min(size, units * p // parts * unit) for p in range(parts + 1)))


class Mesh:
    """One of `size` ranks, and its connection to the others. This class is a single rank. stage, stages: if the
    model is divided by its layers, the part that this rank and those that it meets have, and the number of parts."""

    rank = 0
    size = 1
    stage = 0
    stages = 1

    def part(self, parts: int) -> int:
        """The part that this rank holds."""
        return self.rank * parts // self.size

    def most_parts(self, fits: Callable[[int], bool]) -> int:
        """The largest power of two, at most the number of ranks, for which `fits` is true; 1 always fits."""
        parts = self.size
        while parts > 1 and not fits(parts):
            parts //= 2
        return parts

    def meet(self, mine: np.ndarray) -> Sequence[np.ndarray]:
        """Returns the arrays of all ranks, by rank, once all have called it. All ranks call it in the same order. The
        returned arrays do not change when the caller changes `mine`."""
        return (mine,)


SOLO = Mesh()


def each_part(everyones: Sequence[Array], parts: int) -> Sequence[Array]:
    """The array of each part, from the first rank that holds it."""
    return everyones[:: len(everyones) // parts]


def tree_sum(everyones: Sequence[Array], parts: int) -> Array:
    """Adds the parts' sums in a balanced tree, as kernels join segments: neighbors first."""
    sums = each_part(everyones, parts)
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def side_by_side(everyones: Sequence[np.ndarray], parts: int) -> np.ndarray:
    """[rows, all columns] from the parts' columns."""
    return np.concatenate(each_part(everyones, parts), axis=1)


def picked(everyones: Sequence[np.ndarray], ids: np.ndarray, table: Cut) -> np.ndarray:
    """Row i from the part of the table that holds ids[i]. Adding zeros from other ranks would turn -0 into 0."""
    part = np.searchsorted(table.borders, ids, side="right") - 1
    return np.stack(each_part(everyones, table.parts))[part, np.arange(len(ids))]


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """How ranks share the experts of a mixture: each rank holds some experts, or a part of each expert's sums.

    experts: the cut of their ids. parts: how many parts each expert's last sum is cut into.
    """

    mesh: Mesh
    experts: Cut
    parts: int

    @property
    def held(self) -> tuple[int, int]:
        """The ids of the experts that this rank holds: [first, last)."""
        return self.experts.range(self.mesh.part(self.experts.parts))

    def complete(self, rows_SD: np.ndarray, begins: np.ndarray) -> None:
        """Completes in place the rows that go to experts, [S, D], before they are weighted. They are sorted by expert;
        the rows of expert e begin at begins[e], int64 [experts + 1]."""
        everyones = self.mesh.meet(rows_SD)
        if self.parts > 1:
            rows_SD[:] = tree_sum(everyones, self.parts)
        for part, theirs in enumerate(each_part(everyones, self.experts.parts)):
            first, last = (begins[e] for e in self.experts.range(part))
            if self.experts.parts > 1:
                rows_SD[first:last] = theirs[first:last]

    def add_up(self, rows_SD: np.ndarray) -> None:
        """Adds up in place the ranks' parts of sums, [S, D]."""
        rows_SD[:] = tree_sum(self.mesh.meet(rows_SD), self.parts)
