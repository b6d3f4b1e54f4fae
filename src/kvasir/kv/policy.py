"""Eviction policies: pure functions from a node's facts to its rank. The node with the lowest rank is evicted first.

The rank of a node never decreases: the eviction queues rely on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class NodeFacts(Protocol):
    """The fields of a node that a policy may read. Times are ticks of the tree, one for each insert and each used hit.

    created, last_used: ticks. hits: how often the node was part of a used hit. priority: the highest of its requests.
    """

    created: int
    last_used: int
    hits: int
    priority: int


Rank = tuple[int, ...]
Policy = Callable[[NodeFacts], Rank]


def lru(f: NodeFacts) -> Rank:
    """Least recently used first."""
    return (f.last_used,)


def lfu(f: NodeFacts) -> Rank:
    """Fewest hits first, then least recently used."""
    return (f.hits, f.last_used)


def fifo(f: NodeFacts) -> Rank:
    """Oldest first."""
    return (f.created,)


def priority(f: NodeFacts) -> Rank:
    """Lowest request priority first, then least recently used."""
    return (f.priority, f.last_used)


POLICIES: dict[str, Policy] = {"lru": lru, "lfu": lfu, "fifo": fifo, "priority": priority}
