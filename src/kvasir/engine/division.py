"""How several engines divide a machine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvasir.config import GIB, EngineOptions
from kvasir.device import has_driver, processors_by_core


def processors_of(options: EngineOptions, count: int) -> list[tuple[int, ...]]:
    """The processors of each of `count` engines; () for all, if a GPU computes or the number of threads is given."""
    computes = options.device == "cpu" or not has_driver()
    return shares(processors_by_core(), count) if computes and not options.threads else [()] * count


def divided(options: EngineOptions, count: int, index: int) -> EngineOptions:
    """The options of one of `count` replicas. What was given for an engine applies to each, except shares of the memory
    and the folder for prefixes: each replica has a part of them."""
    fraction = options.memory_fraction and options.memory_fraction / count
    own = replace(options, memory_fraction=fraction, host_share=options.host_share / count)
    if options.cache_dir is None:
        return own
    folder = str(Path(options.cache_dir) / f"replica-{index}")
    return replace(own, cache_dir=folder, cache_disk=max(1, (options.cache_disk or 16 * GIB) // count))


def shares(cores: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """The processors of each replica: a run of whole cores, of nearly equal lengths; replicas share cores only if there
    are fewer cores than replicas. cores: the processors of each core."""
    if len(cores) < count:
        return [tuple(cores[i % len(cores)]) for i in range(count)]
    bounds = [i * len(cores) // count for i in range(count + 1)]
    return [tuple(p for core in cores[a:b] for p in core) for a, b in itertools.pairwise(bounds)]
