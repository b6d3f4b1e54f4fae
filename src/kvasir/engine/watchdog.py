"""Detects a hung engine process from its replies, its use of the machine, and the time of its steps.

A pure state machine. Silence is counted in ticks: a standstill of this process or of the whole machine adds at most two
ticks. A process that computes or reads gets far more time than an idle process, since a first step, a large prompt or a
slow disk may legitimately take long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import psutil

BUSY_FACTOR = 30  # how much longer a silent process may compute than be idle
QUIET_STEPS, BUSY_STEPS = 10, 100  # allowed silence of an idle and of a busy process, in recent longest steps
FROZEN_SECONDS = 5.0  # of idleness, after which `is_frozen` may hold


class Use(NamedTuple):
    """What a process has used so far: CPU seconds, and bytes read and written."""

    seconds: float = 0.0
    bytes: int = 0

    def exceeds(self, other: Use) -> bool:
        """Whether the difference is more than an idle process uses."""
        return self.seconds - other.seconds >= 0.05 or self.bytes - other.bytes >= 1 << 16


NOTHING = Use()


@dataclass(slots=True)
class Watchdog:
    """floor: idle seconds that are always allowed. longest: seconds of the longest recent step."""

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
        """Records a sign of life, or that the engine owes no reply."""
        self.silent = self.idle = 0.0

    def tick(self, seconds: float, used: Use) -> None:
        """seconds: since the last tick, during which the engine owed a reply. used: by its process in total."""
        passed = min(seconds, 2 * self.pause)
        self.silent += passed
        self.idle += passed
        if used.exceeds(self._used):
            self.idle, self._used = 0.0, used

    @property
    def is_frozen(self) -> bool:
        """Whether the process owes a reply and has been idle for a noticeable time."""
        return self.idle >= min(self.floor / 2, FROZEN_SECONDS)

    @property
    def verdict(self) -> str:
        """Why the process must be killed; empty if it must not."""
        if self.idle >= max(self.floor, QUIET_STEPS * self.longest):
            return f"it has pending work and made no progress for {self.idle:.1f} seconds"
        if self.silent >= max(BUSY_FACTOR * self.floor, BUSY_STEPS * self.longest):
            return f"it is busy and has sent nothing for {self.silent:.0f} seconds"
        return ""


def use_of(pid: int) -> Use:
    """The use of a process; zero if it does not exist."""
    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        moved = process.io_counters() if hasattr(process, "io_counters") else None  # macOS has none
        return Use(times.user + times.system, moved.read_bytes + moved.write_bytes if moved else 0)
    except (psutil.Error, OSError):
        return Use()
