"""Statistics of the processes of one server, and their sum."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_origin

import msgspec

from kvasir.metrics import Histogram, is_gauge
from kvasir.server_statistics import HttpStats, LogStats
from kvasir.statistics import RECENT, FrontStats


class WorkerReport(msgspec.Struct, frozen=True):
    """What one process counts. fronts: by model."""

    http: HttpStats
    fronts: dict[str, FrontStats]

    def __post_init__(self) -> None:
        self.http.logs = {n: LogStats(**x) if isinstance(x, dict) else x for n, x in self.http.logs.items()}

    @classmethod
    def of(cls, http: HttpStats, fronts: dict[str, FrontStats]) -> WorkerReport:
        """The report of a process whose meters these are."""
        logs = {name: LogStats(lines.dropped) for name, lines in http.logs.items()}
        facts: dict[str, Any] = {f.name: getattr(http, f.name) for f in fields(HttpStats)} | {"logs": logs}
        return cls(HttpStats(**facts), {name: plain(front) for name, front in fronts.items()})

    @property
    def ended(self) -> WorkerReport:
        """What remains of it when the process has ended: the counters. Its open streams are broken."""
        http = replace(_ended(self.http), broken=summed(self.http.broken, self.http.streams))
        return WorkerReport(http, {name: _ended(front) for name, front in self.fronts.items()})


def plain(front: FrontStats) -> FrontStats:
    """A meter as a plain value."""
    return FrontStats(**{f.name: getattr(front, f.name) for f in fields(FrontStats)})


def _ended(stats: Any) -> Any:
    return replace(stats, **{f.name: type(getattr(stats, f.name))() for f in fields(stats) if is_gauge(f)})


def total_of(own: WorkerReport, others: Iterable[WorkerReport]) -> WorkerReport:
    """The sum of some reports."""
    for other in others:
        own = WorkerReport(summed(own.http, other.http), summed(own.fronts, other.fronts))
    return own


def summed(one: Any, other: Any) -> Any:
    """The sum of two statistics: of numbers, histograms, and dicts and dataclasses of them. Of the latest measurements,
    both."""
    if isinstance(one, Histogram):
        counts = [a + b for a, b in zip(one.counts, other.counts, strict=True)]
        return Histogram(one.bounds, counts, one.sum + other.sum)
    if is_dataclass(one):
        parts = {f.name: summed(getattr(one, f.name), getattr(other, f.name)) for f in fields(one)}
        return replace(one, **parts)  # type: ignore[type-var]
    if isinstance(one, dict):
        both = {name: summed(one[name], other[name]) if name in one else other[name] for name in other}
        return type(one)(one | both)
    if isinstance(one, deque):
        return deque((*one, *other), maxlen=RECENT)
    return one + other


def enc_hook(value: Any) -> Any:
    """For msgspec: what it does not encode by itself."""
    if isinstance(value, deque):
        return list(value)
    raise NotImplementedError(f"{type(value).__name__} in a message")


def dec_hook(kind: Any, value: Any) -> Any:
    """The reverse of enc_hook. Raises ValueError."""
    match get_origin(kind) or kind:
        case origin if origin is Counter:
            return Counter({_key(name): int(count) for name, count in dict(value).items()})
        case origin if origin is deque:
            return deque(map(float, value), maxlen=RECENT)
    raise ValueError(f"{kind} in a message")


def _key(name: Any) -> Any:
    return tuple(name) if isinstance(name, list) else name
