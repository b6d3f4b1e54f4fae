"""The metrics at /metrics, in Prometheus' text format. Names: https://prometheus.io/docs/practices/naming/

`kvasir.statistics` names them; a collector created for each scrape reads the holders of the numbers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from starlette.types import ASGIApp, Receive, Scope, Send

from kvasir.batch_statistics import BatchStats
from kvasir.metrics import Histogram, StatisticRow, rows, samples
from kvasir.serve.http.asgi import LEFT, Sent
from kvasir.serve.telemetry.lines import LineLog
from kvasir.statistics import OTHER_ADAPTERS, EngineStats, FrontStats, HttpStats

__all__ = ["CONTENT_TYPE", "HttpMeter", "Metered", "ModelMetrics", "buckets", "exposition", "method_of", "route_of"]

_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


@dataclass
class HttpMeter(HttpStats):
    """Counts HTTP requests and what concerns the server as a whole. logs: by name."""

    logs: dict[str, LineLog] = field(default_factory=dict)

    def stall(self) -> None:
        self.stalled += 1


class Metered:
    """ASGI middleware that counts into an HttpMeter."""

    def __init__(self, app: ASGIApp, meter: HttpMeter):
        self.app = app
        self.meter = meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        begun, meter, sent = time.perf_counter(), self.meter, Sent(send)
        meter.open += 1
        try:
            await self.app(scope, receive, sent)
        finally:
            meter.open -= 1
            meter.seconds.add(time.perf_counter() - begun)
            meter.responses[route_of(scope), method_of(scope), sent.status or LEFT] += 1


def route_of(scope: Scope) -> str:
    """The route's pattern, also for requests that were refused before routing. Only patterns of existing routes become
    labels, never paths that clients invent."""
    route = scope.get("route")
    if route is None:
        route = next((r for r in scope["app"].state.routes if r.path_regex.match(scope["path"])), None)
    return getattr(route, "path", "other")


def method_of(scope: Scope) -> str:
    return scope["method"] if scope["method"] in ("GET", "POST", "HEAD", "DELETE", "OPTIONS") else "other"


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """The metrics of one model. stats: None if the engine did not respond. max_adapters: in one step."""

    model: str
    meter: FrontStats
    stats: EngineStats | None
    max_adapters: int = 0


def exposition(
    models: Iterable[ModelMetrics],
    http: HttpStats,
    batches: BatchStats = BatchStats(),
    others: Iterable[Metric] = (),
) -> bytes:
    """The text of a scrape. others: further families, after those of `kvasir.statistics`."""
    registry = CollectorRegistry()
    registry.register(_Scrape(models, http, batches, others))  # type: ignore[arg-type]
    return generate_latest(registry)


class _Scrape:
    def __init__(self, models: Iterable[ModelMetrics], http: HttpStats, batches: BatchStats, others: Iterable[Metric]):
        self.models = models
        self.http = http
        self.batches = batches
        self.others = others

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields each metric family once, with the samples of all models."""
        families: dict[str, Any] = {}
        _add(families, HttpStats, self.http)
        _add(families, BatchStats, self.batches)
        for served in self.models:
            _add(families, FrontStats, served.meter, model_name=served.model)
            if served.stats is not None:
                _add(families, EngineStats, served.stats, model_name=served.model)
        yield from families.values()
        yield _lora_info(self.models)
        yield from self.others


def _lora_info(models: Iterable[ModelMetrics]) -> Metric:
    """vLLM's metric, by which gateways send requests to where their adapters are. Its value is the time."""
    labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    family = GaugeMetricFamily(
        "vllm:lora_requests_info", "Adapters of running and of waiting requests.", labels=("model_name", *labels)
    )
    for served in models:
        if served.stats and served.stats.adapters_registered:
            names = [_names(counts) for counts in (served.stats.adapters_running, served.stats.adapters_waiting)]
            family.add_metric((served.model, str(served.max_adapters), *names), time.time())
    return family


def _names(counts: Mapping[str, int]) -> str:
    return ",".join(sorted(name for name in counts if name != OTHER_ADAPTERS))


def _add(families: dict[str, Any], holder: type, value: object, **labels: str) -> None:
    """Adds the families of a dataclass of statistics, and the samples of `value`, by name. labels: of all samples."""
    for row in rows(holder, tuple(labels)):
        if row.is_exported and row.statistic.name not in families:
            families[row.statistic.name] = _family(row)
    for name, values, number in samples(holder, value, tuple(labels.values())):
        if isinstance(number, Histogram):
            families[name].add_metric(values, buckets=buckets(number), sum_value=number.sum)
        else:
            families[name].add_metric(values, number)


def _family(row: StatisticRow) -> Metric:
    return _FAMILIES[row.statistic.kind](f"kvasir_{row.statistic.name}", row.statistic.help, labels=row.labels)


def buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """(upper bound as text, number of values up to it), as prometheus_client takes them."""
    return [("+Inf" if end == float("inf") else repr(end), count) for end, count in histogram.cumulative()]
