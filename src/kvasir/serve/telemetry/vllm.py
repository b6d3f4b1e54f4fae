"""The metrics under the names of vLLM, for its dashboards and autoscalers.

Names: https://docs.vllm.ai/en/stable/usage/metrics/. Its requests have one choice each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvasir.metrics import Histogram
from kvasir.serve.telemetry.metrics import ModelMetrics, buckets
from kvasir.statistics import EngineStats, FrontStats

# the family, its name without prefix and suffix, its help, and the value
_Found = tuple[Callable[..., Metric], str, str, Any]


def vllm_families(models: Sequence[ModelMetrics]) -> list[Metric]:
    """Each family with the samples of all models. Without the engine's for an engine that did not respond."""
    families: dict[str, Any] = {}
    for served in models:
        found = [*_of_front(served.meter), *(_of_engine(served.stats) if served.stats else ())]
        for kind, name, help, value in found:
            if name not in families:
                families[name] = kind(f"vllm:{name}", help, labels=("model_name",))
            if isinstance(value, Histogram):
                families[name].add_metric((served.model,), buckets=buckets(value), sum_value=value.sum)
            else:
                families[name].add_metric((served.model,), value)
    return [*families.values(), _finished(models)]


def _of_front(front: FrontStats) -> Iterator[_Found]:
    yield CounterMetricFamily, "prompt_tokens", "Prompt tokens.", front.prompt_tokens
    yield CounterMetricFamily, "generation_tokens", "Output tokens.", front.generated_tokens
    first = _sum(of.first_token for of in front.classes.values())
    yield HistogramMetricFamily, "time_to_first_token_seconds", "Time to the first token.", first
    between = _sum(of.per_token for of in front.classes.values())
    yield HistogramMetricFamily, "inter_token_latency_seconds", "Time from each token to the next.", between
    yield HistogramMetricFamily, "e2e_request_latency_seconds", "Time of a request.", front.request
    yield HistogramMetricFamily, "request_prompt_tokens", "Prompt tokens of a request.", front.prompt_length
    yield HistogramMetricFamily, "request_generation_tokens", "Output tokens of a choice.", front.answer_length


def _of_engine(stats: EngineStats) -> Iterator[_Found]:
    yield GaugeMetricFamily, "num_requests_running", "Choices running.", stats.running
    yield GaugeMetricFamily, "num_requests_waiting", "Choices waiting in the queue.", stats.waiting
    used = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
    yield GaugeMetricFamily, "kv_cache_usage_perc", "KV memory that sequences use; 1 is all of it.", used
    yield CounterMetricFamily, "prefix_cache_queries", "Tokens looked up.", stats.looked_up_tokens
    yield CounterMetricFamily, "prefix_cache_hits", "Tokens looked up and found.", stats.cached_tokens
    yield CounterMetricFamily, "num_preemptions", "Preemptions.", stats.preemptions
    queue = _sum(of.queue_seconds for of in stats.classes.values())
    yield HistogramMetricFamily, "request_queue_time_seconds", "Time in the queue.", queue


def _finished(models: Sequence[ModelMetrics]) -> Metric:
    labels = ("model_name", "finished_reason")
    family = CounterMetricFamily("vllm:request_success", "Choices ended, by finish reason.", labels=labels)
    for served in models:
        for reason, count in sorted(served.meter.finished.items()):
            family.add_metric((served.model, str(reason)), count)
    return family


def _sum(histograms: Iterable[Histogram]) -> Histogram:
    """Of histograms with the same buckets."""
    first, *others = [*histograms] or [Histogram()]
    total = first.copy()
    for other in others:
        total.counts = [a + b for a, b in zip(total.counts, other.counts, strict=True)]
        total.sum += other.sum
    return total
