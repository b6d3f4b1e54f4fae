"""Whether an engine process is hung: judged by its answers, its use of the machine, and the time of its steps.

A pure state machine. Silence is counted in ticks: however long this process or the whole machine stood still, that adds
two at most. A process that computes or reads is given far more time than one that does nothing at all, since a first
step, a large prompt or a slow disk may honestly take long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import psutil

BUSY_FACTOR = 30  # how much longer a silent process may compute than do nothing
QUIET_STEPS, BUSY_STEPS = 10, 100  # of the longest step measured lately, that it may be silent
FROZEN_SECONDS = 5.0  # of doing nothing, after which the log says so


class Use(NamedTuple):
    """What a process has used so far: seconds of a processor, bytes read and written."""

    seconds: float = 0.0
    bytes: int = 0

    def exceeds(self, other: Use) -> bool:
        """Whether that is more than answering the kernel takes."""
        return self.seconds - other.seconds >= 0.05 or self.bytes - other.bytes >= 1 << 16


NOTHING = Use()


@dataclass(slots=True)
class Watchdog:
    """floor: seconds of doing nothing that are always granted. longest: seconds of the longest step measured lately."""

    floor: float
    longest: float = 0.0
    silent: float = 0.0
    idle: float = 0.0
    _used: Use = NOTHING

    @property
    def pause(self) -> float:
        """Seconds between two ticks."""
        return min(0.25, self.floor / 8)

    def heard(self) -> None:
        """The engine gave a sign of life, or owes none."""
        self.silent = self.idle = 0.0

    def tick(self, seconds: float, used: Use) -> None:
        """seconds: since the tick before, in which the engine owed an answer. used: by its process."""
        passed = min(seconds, 2 * self.pause)
        self.silent += passed
        self.idle += passed
        if used.exceeds(self._used):
            self.idle, self._used = 0.0, used

    @property
    def is_frozen(self) -> bool:
        """Whether it owes an answer and has done nothing for long enough to say so."""
        return self.idle >= min(self.floor / 2, FROZEN_SECONDS)

    @property
    def verdict(self) -> str:
        """Why the process is to be killed; empty as long as it is not."""
        if self.idle >= max(self.floor, QUIET_STEPS * self.longest):
            return f"it owes an answer and has done nothing for {self.idle:.1f} seconds"
        if self.silent >= max(BUSY_FACTOR * self.floor, BUSY_STEPS * self.longest):
            return f"it is busy and has been silent for {self.silent:.0f} seconds"
        return ""


def use_of(pid: int) -> Use:
    """Of a process; nothing for one that is gone."""
    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        moved = process.io_counters() if hasattr(process, "io_counters") else None  # macOS has none
        return Use(times.user + times.system, moved.read_bytes + moved.write_bytes if moved else 0)
    except (psutil.Error, OSError):
        return Use()
