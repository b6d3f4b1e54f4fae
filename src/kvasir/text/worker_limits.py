"""The limits that a worker of a sandbox sets for itself.

Time is that of the processor: a machine under load computes slowly, which is not the job's fault. Such a timer also
ends calls of libraries that never return, whether or not the parent still lives. A far limit of wall time ends a job
that waits forever.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

FAR_SECONDS, FAR_TIMES = 60.0, 10.0  # limit of wall time, and how much it rises with each second of processor time
GRACE_SECONDS = 1.0  # after the far limit; then a worker that the parent has not killed ends itself
OUT_OF_TIME = signal.SIGPROF  # what ends a worker at its limit of processor time


def far(seconds: float) -> float:
    """The limit of wall time, in seconds, of a job with so many seconds of processor time."""
    return FAR_SECONDS + FAR_TIMES * seconds


def limit_resources(memory: int) -> None:
    """Limits the address space to `memory` bytes, and forbids files larger than 0 bytes and core dumps."""
    signal.signal(OUT_OF_TIME, signal.SIG_DFL)  # which a parent may have ignored
    for kind, limit in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # some systems have the limit but do not allow setting it
            resource.setrlimit(kind, (limit, limit))


@contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """Ends the process at `seconds` of processor time of all its threads, by OUT_OF_TIME, or long after that by
    SIGALRM."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, far(seconds) + GRACE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
