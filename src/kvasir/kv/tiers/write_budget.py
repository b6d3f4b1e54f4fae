"""The time that a tier may spend on writing, limited so that writing costs little if nothing is read back."""

from __future__ import annotations

import threading

FIRST = 0.05  # seconds in the initial balance, for a sample of writes
MOST = 1.0  # greatest balance in seconds
OWED = 0.1  # greatest debt in seconds, so that one slow write on a busy machine does not block the writer for long
HALF = 32  # depth of the block that needs half of MOST to be written
FACTOR = 1.5  # cost beyond the writer's time: a part is also copied out of the pool, on the step's critical path
GUESS = 2e8  # bytes per second, assumed until the first part is written
DECAY = 0.9  # per part: averages about the last ten


class WriteBudget:
    """A balance of seconds, earned by computing and by reading, spent on writing. Thread-safe.

    share: the fraction of the computing time that may be spent; None: unlimited.
    """

    def __init__(self, share: float | None):
        self._share = share
        self._lock = threading.Lock()
        self._balance = FIRST
        self._bytes = self._seconds = 0.0

    def computed(self, seconds: float) -> None:
        """Credits a share of `seconds` of computing time."""
        if self._share is not None:
            self._add(self._share * seconds)

    def saved(self, seconds: float) -> None:
        """Credits the `seconds` that reading a part took less than computing it."""
        self._add(seconds)

    def _add(self, seconds: float) -> None:
        with self._lock:
            self._balance = max(-OWED, min(MOST, self._balance + seconds))

    def affords(self, depth: int) -> bool:
        """Whether a block with `depth` blocks before it may be written; its cost is only known afterwards and may
        become debt. A prefix is matched from its start, so its first blocks have priority when not all can be
        written."""
        return self._share is None or self._balance > MOST * depth / (depth + HALF)

    def take(self, num_bytes: int) -> float:
        """Reserves the estimated time to write `num_bytes`. Returns the reserved seconds, to be passed to `spend`."""
        rate = self._bytes / self._seconds if self._seconds else GUESS
        seconds = FACTOR * num_bytes / rate
        self._add(-seconds)
        return seconds

    def spend(self, taken: float, num_bytes: int, seconds: float) -> None:
        """Replaces a reservation by the cost of the write, which took the writer `seconds`. num_bytes: 0 if nothing was
        written."""
        self._add(taken - FACTOR * seconds)
        if num_bytes:
            with self._lock:
                self._bytes = self._bytes * DECAY + num_bytes
                self._seconds = self._seconds * DECAY + seconds
