#!/usr/bin/env python3
"""Generates docs/metrics.md from the table of statistics.

python scripts/make_metrics_docs.py            writes the page
python scripts/make_metrics_docs.py --check    exits with 1 if the page is stale
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from kvasir.batch_statistics import BatchStats
from kvasir.metrics import StatisticRow, rows
from kvasir.statistics import EngineStats, FrontStats, HttpStats

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
HEAD = """# Metrics

All metrics of `/metrics`, generated from the table in `src/kvasir/statistics.py` by
`python scripts/make_metrics_docs.py`. [Operation](operation.md#metrics) explains how to scrape them and which alerts to
set.

A row of that table also says which panel of the dashboard shows the statistic, and which tile of
[the page](page.md#engine). To add a statistic, add a row and count it: a field of `EngineStats` is read from the
attribute of the same name of the engine's core, the scheduler or the planner. Then run this script and
`scripts/make_dashboard.py`.

A histogram has `_bucket`, `_sum` and `_count`. Totals continue when an engine is restarted after a crash.
"""
SECTIONS: tuple[tuple[str, str, type, tuple[str, ...]], ...] = (
    ("The server", "Metrics of the whole server.", HttpStats, ()),
    ("Batches", "Metrics of [batches](dialects.md#files-and-batches), of the whole server.", BatchStats, ()),
    (
        "Requests and choices",
        "Metrics of a model as its clients see it. A request has `n` choices, one by default.",
        FrontStats,
        ("model_name",),
    ),
    (
        "The engine",
        "Metrics of a model's engine, missing while the engine does not respond.",
        EngineStats,
        ("model_name",),
    ),
)
TAIL = """## Adapters

At most 100 adapters of a model have a value of the label `adapter`: the first 100 that requests use, of running and
waiting choices the most frequent. The others are counted as `all others`. An adapter that is unloaded loses its series.

`vllm:lora_requests_info` is vLLM's, for gateways that send requests to where their adapters are: `max_lora` is the
number of adapters in a step, `running_lora_adapters` and `waiting_lora_adapters` are names, separated by commas, and
the value is the time of the scrape. A database of metrics should drop it, since each set of names is a series.

## Names of vLLM

With `--vllm-metrics` there are also metrics under vLLM's names, for its dashboards and autoscalers. They have the label
`model_name`, and their values and buckets are those of ours. A request with `n` choices counts `n` times, except in
`vllm:e2e_request_latency_seconds` and `vllm:request_prompt_tokens`.

| vLLM | Kvasir |
|---|---|
| `vllm:num_requests_running` | `kvasir_answers_running`, of all classes |
| `vllm:num_requests_waiting` | `kvasir_answers_waiting`, of all classes |
| `vllm:kv_cache_usage_perc` | `kvasir_kv_usage_ratio` |
| `vllm:prefix_cache_queries_total` | `kvasir_prefix_lookup_tokens_total` |
| `vllm:prefix_cache_hits_total` | `kvasir_prefix_hit_tokens_total` |
| `vllm:num_preemptions_total` | `kvasir_preemptions_total` |
| `vllm:prompt_tokens_total` | `kvasir_prompt_tokens_total` |
| `vllm:generation_tokens_total` | `kvasir_generated_tokens_total` |
| `vllm:request_success_total`, by `finished_reason` | `kvasir_answers_total`, by `finish_reason` |
| `vllm:time_to_first_token_seconds` | `kvasir_time_to_first_token_seconds`, of all classes |
| `vllm:inter_token_latency_seconds` | `kvasir_time_per_output_token_seconds`, of all classes |
| `vllm:e2e_request_latency_seconds` | `kvasir_request_seconds` |
| `vllm:request_queue_time_seconds` | `kvasir_queue_time_seconds`, of all classes |
| `vllm:request_prompt_tokens` | `kvasir_request_prompt_tokens` |
| `vllm:request_generation_tokens` | `kvasir_answer_tokens` |
"""


def page() -> str:
    parts = [HEAD]
    for title, text, holder, labels in SECTIONS:
        parts += [f"## {title}\n", f"{text}\n", *_table(rows(holder, labels))]
    return "\n".join([*parts, TAIL])


def _table(found: Iterator[StatisticRow]) -> Iterator[str]:
    yield "| metric | kind | labels | | panels of the dashboard |\n|---|---|---|---|---|"
    named = set()
    for row in found:
        one = row.statistic
        if row.is_exported and one.name not in named:
            named.add(one.name)
            suffix = "_total" if one.kind == "counter" else ""
            labels = ", ".join(f"`{label}`" for label in row.labels)
            panels = ", ".join(chart.title for chart in one.charts)
            yield f"| `kvasir_{one.name}{suffix}` | {one.kind} | {labels} | {one.help} | {panels} |"
    yield ""


def main(arguments: list[str]) -> int:
    text = page()
    if arguments == ["--check"]:
        same = PAGE.is_file() and PAGE.read_text() == text
        print(f"{PAGE} is {'up to date' if same else 'stale; run python scripts/make_metrics_docs.py'}")
        return 0 if same else 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
