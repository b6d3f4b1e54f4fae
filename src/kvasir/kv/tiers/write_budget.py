"""The time that a tier may spend on writing, so that it costs little where no request reads what it wrote."""

from __future__ import annotations

import threading

FIRST = 0.05  # seconds that may be spent before anything was earned: a sample
MOST = 1.0  # seconds that are put by at most
OWED = 0.1  # and owed: one write that took very long, on a machine that was busy with something else, is no rule
HALF = 32  # the block that is written when half of them are there
FACTOR = 1.5  # beside the writer's own time, a part takes some on the step's path: it is copied out of the pool
GUESS = 2e8  # bytes a second, until the first part was written
DECAY = 0.9  # per part: about the last ten count


class WriteBudget:
    """Seconds, earned by computing and by reading, spent on writing. Any thread may call.

    share: of what computing takes, so much may be spent; None: all that is wished.
    """

    def __init__(self, share: float | None):
        self._share = share
        self._lock = threading.Lock()
        self._balance = FIRST
        self._bytes = self._seconds = 0.0

    def computed(self, seconds: float) -> None:
        """The engine computed for so long."""
        if self._share is not None:
            self._add(self._share * seconds)

    def saved(self, seconds: float) -> None:
        """So much faster was reading than computing would have been."""
        self._add(seconds)

    def _add(self, seconds: float) -> None:
        with self._lock:
            self._balance = max(-OWED, min(MOST, self._balance + seconds))

    def affords(self, depth: int) -> bool:
        """Whether a block with so many before it may be written: what that takes is only known afterwards, and then
        owed. A prefix is found from its beginning, so where not all can be written that comes first."""
        return self._share is None or self._balance > MOST * depth / (depth + HALF)

    def take(self, num_bytes: int) -> float:
        """So many bytes will be written. Returns the seconds that were taken out for them, to be given to `spend`."""
        rate = self._bytes / self._seconds if self._seconds else GUESS
        seconds = FACTOR * num_bytes / rate
        self._add(-seconds)
        return seconds

    def spend(self, taken: float, num_bytes: int, seconds: float) -> None:
        """They were written, which took the writer so long, or not at all: 0 bytes."""
        self._add(taken - FACTOR * seconds)
        if num_bytes:
            with self._lock:
                self._bytes = self._bytes * DECAY + num_bytes
                self._seconds = self._seconds * DECAY + seconds
