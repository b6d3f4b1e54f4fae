"""The metrics at /metrics, in Prometheus' text format. Names: https://prometheus.io/docs/practices/naming/

The numbers are counted elsewhere as plain objects; a collector created for each scrape names them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from starlette.types import ASGIApp, Receive, Scope, Send

from kvasir.engine.meter import Meter
from kvasir.metrics import Histogram
from kvasir.serve.asgi import LEFT, Sent
from kvasir.serve.lines import LineLog
from kvasir.types import EngineStats

__all__ = ["CONTENT_TYPE", "HttpMeter", "Metered", "Told", "exposition", "method_of", "route_of"]

CLASS = "service_class"


class HttpMeter:
    """Responses by route, method and status, and their durations. stalled: connections closed because the client did
    not read. reloads: reloads of files by name and outcome. logs: by name."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, str, int]] = Counter()
        self.seconds = Histogram()
        self.open = 0
        self.stalled = 0
        self.reloads: Counter[tuple[str, str]] = Counter()
        self.logs: dict[str, LineLog] = {}

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
class Told:
    """The metrics of one model. stats: None if the engine did not respond."""

    model: str
    meter: Meter
    stats: EngineStats | None


def exposition(models: Iterable[Told], http: HttpMeter) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Scrape(models, http))  # type: ignore[arg-type]
    return generate_latest(registry)


class _Scrape:
    def __init__(self, models: Iterable[Told], http: HttpMeter):
        self.models = models
        self.http = http

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields each metric family once, with the samples of all models."""
        yield from _http(self.http)
        families: dict[str, Metric] = {}
        for told in self.models:
            for family in _Model(told).families():
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        yield from families.values()


def _http(http: HttpMeter) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "kvasir_http_requests", "HTTP requests answered.", labels=["route", "method", "code"]
    )
    for (route, method, code), count in http.responses.items():
        requests.add_metric([route, method, str(code)], count)
    yield requests
    yield GaugeMetricFamily("kvasir_http_requests_open", "HTTP requests being answered.", http.open)
    yield CounterMetricFamily("kvasir_http_stalled", "Connections closed since clients did not read.", http.stalled)
    seconds = HistogramMetricFamily("kvasir_http_request_seconds", "Time of an HTTP request.", labels=[])
    seconds.add_metric([], buckets=_buckets(http.seconds), sum_value=http.seconds.sum)
    yield seconds
    reloads = CounterMetricFamily("kvasir_reloads", "Files read again.", labels=["file", "outcome"])
    for labels, count in http.reloads.items():
        reloads.add_metric(labels, count)
    yield reloads
    dropped = CounterMetricFamily("kvasir_log_lines_dropped", "Lines that a log could not take.", labels=["log"])
    for name, log in http.logs.items():
        dropped.add_metric([name], log.dropped)
    yield dropped


class _Model:
    def __init__(self, told: Told):
        self.model = told.model
        self.meter = told.meter
        self.stats = told.stats

    def families(self) -> Iterator[Metric]:
        yield from self._front()
        if self.stats is not None:
            yield from self._engine(self.stats)

    def _front(self) -> Iterator[Metric]:
        meter = self.meter
        answers = CounterMetricFamily(
            "kvasir_answers", "Answers ended, by reason.", labels=["model_name", "finish_reason"]
        )
        for reason, count in meter.finished.items():
            answers.add_metric([self.model, reason], count)
        yield answers
        yield self._gauge("requests_open", "Requests submitted and not ended.", meter.open_requests)
        yield self._counter("prompt_tokens", "Tokens of prompts.", meter.prompt_tokens)
        yield self._counter("cached_prompt_tokens", "Of these, taken from the cache.", meter.cached_tokens)
        yield self._counter("generated_tokens", "Tokens of answers.", meter.generated_tokens)
        yield self._histogram("request_seconds", "From submission to the last token.", meter.request)
        yield self._histogram("request_prompt_tokens", "Tokens of a prompt.", meter.prompt_length)
        yield self._histogram("answer_tokens", "Tokens of an answer.", meter.answer_length)
        classes = meter.classes.items()
        first, per_token = [(c, m.first_token) for c, m in classes], [(c, m.per_token) for c, m in classes]
        yield self._histograms("time_to_first_token_seconds", "From submission to token.", first)
        yield self._histograms("time_per_output_token_seconds", "Between tokens.", per_token)
        in_time, late = [(c, m.in_time) for c, m in classes], [(c, m.late) for c, m in classes]
        yield self._counters("answers_in_time", "Complete answers that kept their class's targets.", CLASS, in_time)
        yield self._counters("answers_late", "Complete answers that did not.", CLASS, late)
        expired = [(c, m.expired) for c, m in classes]
        yield self._counters("answers_expired", "Answers that their deadline ended.", CLASS, expired)

    def _engine(self, stats: EngineStats) -> Iterator[Metric]:
        usage = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        classes = stats.classes.items()
        yield self._gauges("answers_running", "Answers being computed.", [(c, s.running) for c, s in classes])
        yield self._gauges("answers_waiting", "Answers in the queue.", [(c, s.waiting) for c, s in classes])
        yield self._gauge("answers_paused", "Answers whose readers have not taken what there is.", stats.paused)
        yield self._counter("answer_pauses", "Times that an answer was paused for a slow reader.", stats.pauses)
        displaced, queued = [(c, s.displaced) for c, s in classes], [(c, s.queue_seconds) for c, s in classes]
        yield self._counters("answers_displaced", "Answers that left their row to a higher class.", CLASS, displaced)
        yield self._histograms("queue_time_seconds", "From an answer's arrival in the engine to its row.", queued)
        yield self._gauge("kv_usage_ratio", "Part of the KV memory in use.", usage)
        yield self._gauge("kv_blocks", "Blocks of KV memory.", stats.blocks_total)
        yield self._gauge("kv_cached_blocks", "Blocks that hold cached prefixes alone.", stats.blocks_cached)
        yield self._counter("prefix_lookup_tokens", "Tokens looked up in the prefix cache.", stats.looked_up_tokens)
        yield self._counter("prefix_hit_tokens", "Of these, found there.", stats.cached_tokens)
        yield self._counter("prefix_evicted_blocks", "Blocks taken back from the prefix cache.", stats.evicted_blocks)
        yield from self._tiers(stats)
        yield self._counter("preemptions", "Answers that had to leave and come back.", stats.preemptions)
        yield self._counter("masked_rows", "Tokens sampled under the mask of a grammar.", stats.masked_rows)
        yield self._counter("forced_tokens", "Tokens a grammar left no choice for, taken at once.", stats.forced_tokens)
        yield self._counter("engine_steps", "Steps computed.", stats.steps)
        yield self._counter("engine_step_seconds", "Time spent in steps.", stats.step_seconds)
        yield self._counter("engine_kernel_seconds", "Of it, time inside native programs.", stats.kernel_seconds)
        yield self._counter("engine_answers_finished", "Answers ended in the engine.", stats.finished)
        yield self._counter("engine_answers_aborted", "Of these, ended from outside.", stats.aborted)

    def _tiers(self, stats: EngineStats) -> Iterator[Metric]:
        tiers = sorted(stats.tiers.items())
        yield self._counter("tier_hit_tokens", "Tokens read from tiers.", stats.tier_loaded_tokens)
        loads = [*((tier, s.loads) for tier, s in tiers), ("none", stats.tier_unused)]
        yield self._outcomes("tier_loads", "Parts of blocks asked of a tier, by outcome.", loads)
        saves = [(tier, s.saves) for tier, s in tiers]
        yield self._outcomes("tier_saves", "Parts of blocks offered to a tier, by outcome.", saves)
        loaded, saved = [(t, s.bytes_loaded) for t, s in tiers], [(t, s.bytes_saved) for t, s in tiers]
        yield self._counters("tier_loaded_bytes", "Bytes read from a tier.", "tier", loaded)
        yield self._counters("tier_saved_bytes", "Bytes written to a tier.", "tier", saved)
        evicted, held = [(t, s.evicted) for t, s in tiers], [(t, s.num_bytes) for t, s in tiers]
        yield self._counters("tier_evicted", "Parts that a tier gave up for others.", "tier", evicted)
        yield self._gauges("tier_bytes", "Bytes in a tier.", held, "tier")

    def _outcomes(self, name: str, text: str, counts: Iterable[tuple[str, dict[str, int]]]) -> Metric:
        family = CounterMetricFamily(f"kvasir_{name}", text, labels=["model_name", "tier", "outcome"])
        for tier, by_outcome in counts:
            for outcome, count in sorted(by_outcome.items()):
                family.add_metric([self.model, tier, outcome], count)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"kvasir_{name}", text, labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"kvasir_{name}", text, labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def _gauges(self, name: str, text: str, values: Iterable[tuple[str, float]], label: str = CLASS) -> Metric:
        family = GaugeMetricFamily(f"kvasir_{name}", text, labels=["model_name", label])
        for value, count in values:
            family.add_metric([self.model, value], count)
        return family

    def _counters(self, name: str, text: str, label: str, counts: Iterable[tuple[str, int]]) -> Metric:
        family = CounterMetricFamily(f"kvasir_{name}", text, labels=["model_name", label])
        for value, count in sorted(counts):
            family.add_metric([self.model, value], count)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"kvasir_{name}", text, labels=["model_name"])
        family.add_metric([self.model], buckets=_buckets(histogram), sum_value=histogram.sum)
        return family

    def _histograms(self, name: str, text: str, histograms: Iterable[tuple[str, Histogram]]) -> Metric:
        family = HistogramMetricFamily(f"kvasir_{name}", text, labels=["model_name", CLASS])
        for service_class, histogram in histograms:
            family.add_metric([self.model, service_class], buckets=_buckets(histogram), sum_value=histogram.sum)
        return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    return [("+Inf" if end == float("inf") else repr(end), count) for end, count in histogram.cumulative()]
