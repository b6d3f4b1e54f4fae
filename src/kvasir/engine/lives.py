"""What an engine counted over all its lives: totals never fall when it dies and is started again."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from kvasir.metrics import Histogram
from kvasir.types import ClassStats, EngineStats

# What is so now, not what was counted.
GAUGES = frozenset(
    (
        *("running", "waiting", "blocks_total", "blocks_used", "blocks_cached", "block_size"),
        *("tier_bytes", "tier_queued_bytes", "pid"),
    )
)


class Lives:
    """The totals of the lives before this one, as far as the dead had told them."""

    def __init__(self) -> None:
        self._before = EngineStats()
        self._last = EngineStats()  # of the present life

    def add(self, stats: EngineStats) -> EngineStats:
        """What the present life tells, with the totals of all."""
        self._last = stats
        return total(self._before, stats)

    def end(self) -> None:
        """The present life is over."""
        self._before, self._last = total(self._before, self._last), EngineStats()


def total(before: Any, now: Any) -> Any:
    """The stats `now` with the counters of `before` added: numbers, histograms, and these by name or class."""
    match now:
        case EngineStats() | ClassStats():
            names = [f.name for f in fields(now) if f.name not in GAUGES]
            return replace(now, **{name: total(getattr(before, name), getattr(now, name)) for name in names})
        case Histogram():
            counts = [a + b for a, b in zip(before.counts, now.counts, strict=True)]
            return Histogram(now.bounds, counts, before.sum + now.sum)
        case dict():
            kinds = {key: type(value) for key, value in (before | now).items()}
            return {key: total(before.get(key, kind()), now.get(key, kind())) for key, kind in kinds.items()}
    return before + now
