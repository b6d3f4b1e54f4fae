"""What a statistic is: a field of a dataclass whose metadata gives its export and its display. And Histogram.

`kvasir.statistics` declares all statistics with the functions here: `preemptions: int = counter("preemptions", "...")`.
/metrics, the dashboard, the page's tiles and docs/metrics.md are derived from these declarations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
TOKENS = tuple(float(1 << i) for i in range(0, 21, 2))
STATISTIC = "statistic"  # the key of a field's metadata

# recent: the latest measurements, for the page alone.
Kind = Literal["counter", "gauge", "histogram", "recent"]
# How a tile shows a number. share: of the field `of`. growth: what was added to it, as a share of what was added to
# `of`, in the last seconds. median, tail: of the latest measurements.
Form = Literal["count", "rate", "share", "growth", "bytes", "median", "tail"]


@dataclass(slots=True)
class Histogram:
    """Counts per bucket, as a plain value that can be sent between processes. bounds: inclusive upper bounds of the
    buckets, ascending. counts: per bucket, plus one for greater values."""

    bounds: tuple[float, ...] = SECONDS
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[float, int]]:
        """(upper bound, number of values up to it) for each bucket; the last bound is infinite."""
        total, result = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            result.append((bound, total))
        return result

    def copy(self) -> Histogram:
        return Histogram(self.bounds, list(self.counts), self.sum)


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines in a panel of the dashboard. row, title: of the panel. legend: before the labels' values. by: the labels
    that get a line each; None: those of the statistic except the model's name. per: the counter (without prefix and
    suffix) by whose rate the statistic's rate is divided. unit: Grafana's; "": derived from the statistic."""

    row: str
    title: str
    legend: str = ""
    by: tuple[str, ...] | None = None
    per: str = ""
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Tile:
    """A number in a tile of the page. text: of a detail, with {} for the number; "" for the tile's main value.
    of: a field, see Form. optional: the tile is hidden while all such numbers are 0."""

    title: str
    form: Form
    text: str = ""
    of: str = ""
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Statistic:
    """A number, a histogram, or a dict of numbers by the values of labels.

    name: without prefix and suffix; "" if it is not exported, for the reason in `help`. labels: what the keys of a dict
    are; a key is a tuple if there are several. above: values of the outer labels, if no dict of holders gives them.
    share_of: the field by which the value is divided for export.
    """

    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...] = ()
    above: tuple[str, ...] = ()
    share_of: str = ""
    charts: tuple[Chart, ...] = ()
    tiles: tuple[Tile, ...] = ()


@dataclass(frozen=True, slots=True)
class Each:
    """A dict of holders of statistics. label: what its keys are. holder: a dataclass of statistics."""

    label: str
    holder: type


def _statistic(kind: Kind, name: str, help: str, shown: tuple[Chart | Tile, ...], start: Callable, **more: Any) -> Any:
    charts = tuple(one for one in shown if isinstance(one, Chart))
    tiles = tuple(one for one in shown if isinstance(one, Tile))
    statistic = Statistic(kind, name, help, charts=charts, tiles=tiles, **more)
    return field(default_factory=start, metadata={STATISTIC: statistic})


# The declarations: `start` makes the first value, `more` are fields of Statistic. They return Any as dataclasses.field
# does for type checkers.


def counter(name: str, help: str, *shown: Chart | Tile, start: Callable = int, **more: Any) -> Any:
    return _statistic("counter", name, help, shown, start, **more)


def gauge(name: str, help: str, *shown: Chart | Tile, start: Callable = int, **more: Any) -> Any:
    return _statistic("gauge", name, help, shown, start, **more)


def histogram(name: str, help: str, *shown: Chart | Tile, start: Callable = Histogram) -> Any:
    return _statistic("histogram", name, help, shown, start)


def recent(name: str, help: str, *shown: Tile, start: Callable) -> Any:
    return _statistic("recent", name, help, shown, start)


def each(label: str, holder: type, start: Callable = dict) -> Any:
    return field(default_factory=start, metadata={STATISTIC: Each(label, holder)})


def is_gauge(of: Field[Any]) -> bool:
    return getattr(of.metadata[STATISTIC], "kind", "") == "gauge"


@dataclass(frozen=True, slots=True)
class StatisticRow:
    """A statistic in the table. field: of its holder. labels: the names of all its labels."""

    field: str
    statistic: Statistic
    labels: tuple[str, ...]

    @property
    def is_exported(self) -> bool:
        return bool(self.statistic.name) and self.statistic.kind != "recent"


def rows(holder: type, labels: tuple[str, ...] = ()) -> Iterator[StatisticRow]:
    """All statistics of a dataclass in order, including those of nested holders."""
    for of in fields(holder):
        match of.metadata[STATISTIC]:
            case Each(label, inner):
                yield from rows(inner, (*labels, label))
            case Statistic() as statistic:
                yield StatisticRow(of.name, statistic, (*labels, *statistic.labels))


def samples(holder: type, value: Any, labels: tuple[str, ...] = ()) -> Iterator[tuple[str, list[str], Any]]:
    """(name, values of the labels, number or Histogram) of each exported statistic of `value`, which has the fields of
    the dataclass `holder`. labels: values of the outer labels."""
    for of in fields(holder):
        now = getattr(value, of.name)
        match of.metadata[STATISTIC]:
            case Each(_, inner):
                for key in sorted(now):
                    yield from samples(inner, now[key], (*labels, key))
            case Statistic(kind, name) as statistic if name and kind != "recent":
                if statistic.share_of:
                    now = now / whole if (whole := getattr(value, statistic.share_of)) else 0.0
                yield from ((name, [*labels, *map(str, key)], one) for key, one in _by_key(now, statistic))


def latest(holder: type, value: Any) -> Iterator[tuple[str, Any]]:
    """(name, values) of each statistic of latest measurements."""
    for row in rows(holder):
        if row.statistic.kind == "recent":
            yield row.statistic.name, getattr(value, row.field)


def _by_key(value: Any, statistic: Statistic) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if not isinstance(value, dict):
        yield statistic.above, value
        return
    for key, one in sorted(value.items()):
        yield (*statistic.above, *(key if isinstance(key, tuple) else (key,))), one
