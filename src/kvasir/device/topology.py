"""Which processors each of several processes that compute together should run on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def memory_nodes(root: Path = Path("/sys")) -> list[list[int]]:
    """The processors of each NUMA node that this process may run on, without empty nodes; a single node if the system
    does not report them."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]
    folders = sorted((root / "devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    nodes = []
    for folder in folders:
        try:
            there = _listed((folder / "cpulist").read_text())
        except (OSError, ValueError):
            return [allowed]
        nodes.append([processor for processor in allowed if processor in there])
    return [node for node in nodes if node] or [allowed]


def shares(nodes: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """The processors of each of `size` processes: whole nodes, or a part of one node; with fewer processors than
    processes some have the same."""
    processors = [processor for node in nodes for processor in node]
    if len(nodes) >= size:
        cut = [nodes[i * len(nodes) // size : (i + 1) * len(nodes) // size] for i in range(size)]
        return [[processor for node in some for processor in node] for some in cut]
    if size % len(nodes) == 0:
        each = size // len(nodes)
        return [part for node in nodes for part in _parts(node, each)]
    return _parts(processors, size)


def stay_on(processors: Sequence[int]) -> None:
    """Keeps the calling thread, and those that it starts later, on these processors."""
    os.sched_setaffinity(0, processors)


def _parts(items: Sequence[int], count: int) -> list[list[int]]:
    if len(items) < count:
        return [[items[i % len(items)]] for i in range(count)]
    return [[*items[i * len(items) // count : (i + 1) * len(items) // count]] for i in range(count)]


def _listed(text: str) -> set[int]:
    """The numbers of a list like 0-3,8."""
    ends = (part.split("-") for part in text.strip().split(",") if part)
    return {number for first, *last in ends for number in range(int(first), int(last[0] if last else first) + 1)}
