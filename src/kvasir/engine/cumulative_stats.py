"""An engine's totals across restarts: they never decrease when its process dies and is restarted."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from kvasir.metrics import Histogram, is_gauge
from kvasir.statistics import EngineStats


class CumulativeStats:
    """Adds up the totals of an engine's successive processes, as last reported by each."""

    def __init__(self) -> None:
        self._before = EngineStats()
        self._last = EngineStats()  # of the current process

    def add(self, stats: EngineStats) -> EngineStats:
        """The stats of the current process, with the totals of all processes."""
        self._last = stats
        return total(self._before, stats)

    def end(self) -> None:
        """Records that the current process has ended."""
        self._before, self._last = total(self._before, self._last), EngineStats()


def total(before: Any, now: Any, gauges: bool = False) -> Any:
    """The stats `now` plus the counters of `before`: numbers, histograms, and dicts of them by name. gauges: add them
    as well."""
    if isinstance(now, Histogram):
        counts = [a + b for a, b in zip(before.counts, now.counts, strict=True)]
        return Histogram(now.bounds, counts, before.sum + now.sum)
    if is_dataclass(now):
        names = [f.name for f in fields(now) if gauges or not is_gauge(f)]
        found = {name: total(getattr(before, name), getattr(now, name), gauges) for name in names}
        return replace(now, **found)  # type: ignore[type-var]
    if isinstance(now, dict):
        gone = {name: value if gauges else ended(value) for name, value in before.items() if name not in now}
        both = {name: total(before[name], value, gauges) if name in before else value for name, value in now.items()}
        return gone | both
    return before + now


def ended(stats: Any) -> Any:
    """The counters of stats that no longer change; gauges are 0, or empty."""
    if isinstance(stats, dict):
        return {name: ended(value) for name, value in stats.items()}
    if not is_dataclass(stats) or isinstance(stats, Histogram):
        return stats
    values = {f: getattr(stats, f.name) for f in fields(stats)}
    kept = {f.name: type(value)() if is_gauge(f) else ended(value) for f, value in values.items()}
    return replace(stats, **kept)  # type: ignore[type-var]
