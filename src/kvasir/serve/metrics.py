"""What /metrics tells, in Prometheus' text format. Names: https://prometheus.io/docs/practices/naming/

The numbers are counted elsewhere as plain objects; a collector made for each scrape puts names on them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvasir.engine.meter import SECONDS, Histogram, Meter
from kvasir.types import EngineStats

__all__ = ["CONTENT_TYPE", "HttpMeter", "Metered", "exposition"]


class HttpMeter:
    """Responses by route, method and status, and how long they took."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, str, int]] = Counter()
        self.seconds = Histogram(SECONDS)
        self.open = 0


class Metered:
    """ASGI middleware that counts into an HttpMeter. 499 stands for a client that left before there was a
    status."""

    def __init__(self, app: ASGIApp, meter: HttpMeter):
        self.app = app
        self.meter = meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status = 499

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        begun, meter = time.perf_counter(), self.meter
        meter.open += 1
        try:
            await self.app(scope, receive, noting)
        finally:
            meter.open -= 1
            meter.seconds.add(time.perf_counter() - begun)
            meter.responses[_route(scope), _method(scope), status] += 1


def _route(scope: Scope) -> str:
    """The route's pattern: paths that exist are few, those that clients make up are not."""
    return getattr(scope.get("route"), "path", "other")


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in ("GET", "POST", "HEAD", "OPTIONS") else "other"


def exposition(model: str, meter: Meter, http: HttpMeter, stats: EngineStats | None) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Scrape(model, meter, http, stats))  # type: ignore[arg-type]
    return generate_latest(registry)


class _Scrape:
    def __init__(self, model: str, meter: Meter, http: HttpMeter, stats: EngineStats | None):
        self.model = model
        self.meter = meter
        self.http = http
        self.stats = stats

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._http()
        yield from self._front()
        if self.stats is not None:
            yield from self._engine(self.stats)

    def _http(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "kvasir_http_requests", "HTTP requests answered.", labels=["route", "method", "code"]
        )
        for (route, method, code), count in self.http.responses.items():
            requests.add_metric([route, method, str(code)], count)
        yield requests
        yield self._gauge("http_requests_open", "HTTP requests being answered.", self.http.open)
        yield self._histogram("http_request_seconds", "Time of an HTTP request.", self.http.seconds)

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
        yield self._histogram("time_to_first_token_seconds", "From submission to token.", meter.first_token)
        yield self._histogram("time_per_output_token_seconds", "Between tokens.", meter.per_token)
        yield self._histogram("request_seconds", "From submission to the last token.", meter.request)
        yield self._histogram("request_prompt_tokens", "Tokens of a prompt.", meter.prompt_length)
        yield self._histogram("answer_tokens", "Tokens of an answer.", meter.answer_length)

    def _engine(self, stats: EngineStats) -> Iterator[Metric]:
        usage = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        yield self._gauge("answers_running", "Answers being computed.", stats.running)
        yield self._gauge("answers_waiting", "Answers in the queue.", stats.waiting)
        yield self._gauge("kv_usage_ratio", "Part of the KV memory in use.", usage)
        yield self._gauge("kv_blocks", "Blocks of KV memory.", stats.blocks_total)
        yield self._gauge("kv_cached_blocks", "Blocks that hold cached prefixes alone.", stats.blocks_cached)
        yield self._counter("prefix_lookup_tokens", "Tokens looked up in the prefix cache.", stats.looked_up_tokens)
        yield self._counter("prefix_hit_tokens", "Of these, found there.", stats.cached_tokens)
        yield self._counter("prefix_evicted_blocks", "Blocks taken back from the prefix cache.", stats.evicted_blocks)
        yield self._counter("tier_hit_tokens", "Tokens read from the tier.", stats.tier_loaded_tokens)
        yield self._outcomes("tier_loads", "Parts of blocks asked of the tier, by outcome.", stats.tier_loads)
        yield self._outcomes("tier_saves", "Parts of blocks given to the tier, by outcome.", stats.tier_saves)
        yield self._counter("tier_loaded_bytes", "Bytes read from the tier.", stats.tier_bytes_loaded)
        yield self._counter("tier_saved_bytes", "Bytes written to the tier.", stats.tier_bytes_saved)
        yield self._counter("tier_evicted", "Parts that the tier gave up for others.", stats.tier_evicted)
        yield self._gauge("tier_bytes", "Bytes in the tier.", stats.tier_bytes)
        yield self._counter("preemptions", "Answers that had to leave and come back.", stats.preemptions)
        yield self._counter("engine_steps", "Steps computed.", stats.steps)
        yield self._counter("engine_step_seconds", "Time spent in steps.", stats.step_seconds)
        yield self._counter("engine_kernel_seconds", "Of it, time inside native programs.", stats.kernel_seconds)
        yield self._counter("engine_answers_finished", "Answers ended in the engine.", stats.finished)
        yield self._counter("engine_answers_aborted", "Of these, ended from outside.", stats.aborted)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"kvasir_{name}", text, labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"kvasir_{name}", text, labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def _outcomes(self, name: str, text: str, counts: dict[str, int]) -> Metric:
        family = CounterMetricFamily(f"kvasir_{name}", text, labels=["model_name", "outcome"])
        for outcome, count in sorted(counts.items()):
            family.add_metric([self.model, outcome], count)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"kvasir_{name}", text, labels=["model_name"])
        buckets = [("+Inf" if b == float("inf") else repr(b), n) for b, n in histogram.cumulative()]
        family.add_metric([self.model], buckets=buckets, sum_value=histogram.sum)
        return family
