"""Which cached node goes first: pure functions from a node's facts to a rank. The lowest rank is evicted first.

A node's rank never falls while it lives: the queues of the prefix tree rely on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Facts(Protocol):
    """What a policy may look at. Times are the tree's own ticks: one for each insert and each hit taken."""

    created: int
    last_used: int
    hits: int
    priority: int


Rank = tuple[int, ...]
Policy = Callable[[Facts], Rank]


def lru(f: Facts) -> Rank:
    return (f.last_used,)


def lfu(f: Facts) -> Rank:
    return (f.hits, f.last_used)


def fifo(f: Facts) -> Rank:
    return (f.created,)


def priority(f: Facts) -> Rank:
    return (f.priority, f.last_used)


POLICIES: dict[str, Policy] = {"lru": lru, "lfu": lfu, "fifo": fifo, "priority": priority}
