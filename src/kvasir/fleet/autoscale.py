"""How many replicas a fleet should have. Pure functions of facts and of the time that passed: no clock, no I/O.

The load is measured in replicas. It is the larger of

    rows / capacity      answers under way, by those that one replica computes within the target for the time per token
    backlog / ttft       seconds of prompts that wait, by the target for the time to the first token

Two bounds follow from it: with fewer than `low` replicas each has a load above HIGH, and with more than `high` each has
one below LOW. Between the bounds nothing changes. Late first tokens ask for one more, and let none end. A replica more
than there are requests would have nothing to do.

A change takes time to pay off, so the load must ask for it for a while:

- up, as long as a start takes: by then a replica would have been worth its start. The first one starts at once.
- down, for the delay that is set, and WORTH times as long as a start takes. The next replicas end later, twice as late
  each time one that ended was missed soon after.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvasir.sched.budget import PACE, STRETCH, StepTime

HIGH, LOW = 0.8, 0.5  # loads of a replica
PUNCTUAL = 0.9  # share of first tokens that come in time, if replicas suffice
SOONEST, LATEST = 1.0, 10.0  # bounds of the seconds until replicas are added
WORTH = 10.0  # a replica ends after at least as many times the seconds that its start takes
LONGEST = 8.0  # times the delay that replicas stay


@dataclass(frozen=True, slots=True)
class Limits:
    """least, most: replicas. delay: seconds of less load after which replicas end."""

    least: int
    most: int
    delay: float = 300.0


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """What is known of a fleet at a time.

    replicas: that it has, with those that are starting. requests: open ones. rows: their choices. capacity: choices
    that one replica computes in time (`capacity`). backlog: predicted seconds of the prompts that wait, summed over the
    replicas. ttft: target for the time to the first token, in seconds. in_time: share of the first tokens lately that
    met it. idle: seconds since there was a request. start: seconds that the last start took."""

    replicas: int
    requests: int = 0
    rows: int = 0
    capacity: int = 1
    backlog: float = 0.0
    ttft: float = 2.0
    in_time: float = 1.0
    idle: float = 0.0
    start: float = 0.0


@dataclass(frozen=True, slots=True)
class Past:
    """What a decision remembers. replicas: then. asked: the number that the load has asked for, `lasted` seconds long:
    the least of those above `replicas`, or the greatest of those below. calm: seconds since replicas ended.
    patience: how many times the delay replicas stay."""

    replicas: int = 0
    asked: int = 0
    lasted: float = 0.0
    calm: float = math.inf
    patience: float = 1.0


def capacity(model: StepTime, context: float, tpot: float, rows: int) -> int:
    """Choices that a replica computes at once within the target `tpot` (seconds per token), or at a pace near that of a
    single one if that misses it. context: tokens of a choice. rows: of the replica's batch. At least 1."""
    _, row, key, step = model.costs
    each = row + key * context
    if each <= 0:
        return max(1, rows)
    seconds = max(PACE * tpot, STRETCH * (step + each))
    return max(1, int(min(rows, (seconds - step) / each)))


def needed(limits: Limits, f: FleetFacts) -> tuple[int, int]:
    """The fewest and the most replicas that suit the load, within the limits."""
    load = max(f.rows / f.capacity, f.backlog / f.ttft)
    low = min(_ceil(load / HIGH), f.requests)
    high = max(1, min(_ceil(load / LOW), f.requests))
    if f.in_time < PUNCTUAL:
        low = max(low, min(f.replicas + 1, f.requests))
        high = max(high, f.replicas)
    low = max(low, min(1, f.requests))
    low, high = (min(max(count, limits.least), limits.most) for count in (low, max(low, high)))
    return low, high


def decide(limits: Limits, f: FleetFacts, past: Past, seconds: float) -> tuple[int, Past]:
    """How many replicas there should be from now on, and what to remember. past: of the decision `seconds` ago; Past()
    at first."""
    past = replace(past, calm=past.calm + seconds)
    low, high = needed(limits, f)
    n = f.replicas
    if n < limits.least or n > limits.most or (n == 0 and low):
        return _to(min(max(low, n), limits.most), past)
    if n > limits.least and not f.requests and f.idle >= max(limits.delay, WORTH * f.start):
        return _to(limits.least, past)
    if low > n:
        past = _asks(past, n, low, seconds)
        if past.lasted < min(max(f.start, SOONEST), LATEST):
            return n, past
        missed = past.calm < limits.delay * past.patience
        patience = min(2 * past.patience, LONGEST) if missed else past.patience
        return _to(past.asked, replace(past, patience=patience if past.calm < LONGEST * limits.delay else 1.0))
    if high < n:
        past = _asks(past, n, high, seconds)
        if past.lasted < max(limits.delay * past.patience, WORTH * f.start):
            return n, past
        return _to(past.asked, replace(past, calm=0.0))
    return _to(n, past)


def _to(count: int, past: Past) -> tuple[int, Past]:
    """A decision after which nothing is asked for."""
    return count, replace(past, replicas=count, asked=count, lasted=0.0)


def _asks(past: Past, n: int, count: int, seconds: float) -> Past:
    """The past once the load asks for `count` replicas instead of n."""
    up = count > n
    if past.replicas != n or past.asked == n or (past.asked > n) != up:
        return replace(past, replicas=n, asked=count, lasted=0.0)
    return replace(past, asked=min(past.asked, count) if up else max(past.asked, count), lasted=past.lasted + seconds)


def _ceil(load: float) -> int:
    """Replicas for a load; huge ones are all the same."""
    return math.ceil(min(load, 1e6))
