"""Ranks in one process, each on its own thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from kvasir.errors import ConfigError
from kvasir.parallel import MAX_RANKS, Mesh


class LocalRank(Mesh):
    def __init__(self, ranks: LocalRanks, rank: int):
        self.rank, self.size = rank, ranks.size
        self._ranks = ranks

    def meet(self, mine: np.ndarray) -> Sequence[np.ndarray]:
        return self._ranks.exchange(self.rank, mine)


class LocalRanks:
    """The meeting point of `size` ranks: 1, 2, 4 or 8. A rank that fails calls `abort`, so that no rank waits for it;
    `reset` allows the next meeting, once no rank is in a meeting. Raises ConfigError for another size."""

    def __init__(self, size: int):
        if size < 1 or size > MAX_RANKS or size & (size - 1):
            raise ConfigError(f"{size} ranks cannot share a model", "use 1, 2, 4 or 8: these keep the order of sums")
        self.size = size
        self.meshes = [LocalRank(self, rank) for rank in range(size)]
        self._barrier = threading.Barrier(size)
        self._brought: list[np.ndarray] = [np.empty(0)] * size

    def exchange(self, rank: int, mine: np.ndarray) -> Sequence[np.ndarray]:
        """See Mesh.meet. Raises threading.BrokenBarrierError if another rank has failed."""
        self._brought[rank] = mine.copy()
        self._barrier.wait()
        everyones = list(self._brought)
        self._barrier.wait()  # no rank brings its next array before all have these
        return everyones

    def abort(self) -> None:
        self._barrier.abort()

    def reset(self) -> None:
        self._barrier.reset()
