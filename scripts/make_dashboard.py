#!/usr/bin/env python3
"""Grafana's dashboard of a server, from a table of panels.

    python scripts/make_dashboard.py            writes deploy/grafana/kvasir.json
    python scripts/make_dashboard.py --check    exits 1 if the file is not what the table says

Format: https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "kvasir.json"
WIDTH, HEIGHT = 8, 8  # of a panel; a row has 24 columns
SOURCE = {"type": "prometheus", "uid": "${source}"}
SERVER = 'job=~"$job", instance=~"$instance"'
MODEL = f'{SERVER}, model_name=~"$model"'


def rate(name: str, by: str = "", labels: str = MODEL) -> str:
    """Of a counter, per second, summed over all but these labels."""
    return f"sum by ({by}) (rate({name}{{{labels}}}[$__rate_interval]))"


def total(name: str, by: str = "", labels: str = MODEL) -> str:
    return f"sum by ({by}) ({name}{{{labels}}})"


def quantiles(name: str, by: str = "", labels: str = MODEL) -> list[tuple[str, str]]:
    """Of a histogram, with a legend."""
    label = f" {{{{{by}}}}}" if by else ""
    groups = f"le, {by}" if by else "le"
    return [
        (f"histogram_quantile({q}, {rate(f'{name}_bucket', groups, labels)})", f"p{round(q * 100)}{label}")
        for q in (0.5, 0.95, 0.99)
    ]


CLASS = "service_class"
# Rows of panels: title, unit, and expressions with their legends.
ROWS: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "Requests": [
        ("HTTP responses", "reqps", [(rate("kvasir_http_requests_total", "code", SERVER), "{{code}}")]),
        (
            "HTTP requests by route",
            "reqps",
            [(rate("kvasir_http_requests_total", "method, route", SERVER), "{{route}}")],
        ),
        ("HTTP time", "s", quantiles("kvasir_http_request_seconds", labels=SERVER)),
        (
            "Open requests",
            "short",
            [
                (total("kvasir_http_requests_open", labels=SERVER), "HTTP"),
                (total("kvasir_requests_open", "model_name"), "{{model_name}}"),
            ],
        ),
        ("Answers by finish reason", "reqps", [(rate("kvasir_answers_total", "finish_reason"), "{{finish_reason}}")]),
        ("Request time", "s", quantiles("kvasir_request_seconds")),
    ],
    "Latency by class": [
        ("Time to first token", "s", quantiles("kvasir_time_to_first_token_seconds", CLASS)),
        ("Time per output token", "s", quantiles("kvasir_time_per_output_token_seconds", CLASS)),
        ("Time in the queue", "s", quantiles("kvasir_queue_time_seconds", CLASS)),
        (
            "Answers within their targets",
            "reqps",
            [
                (rate("kvasir_answers_in_time_total", CLASS), "in time {{service_class}}"),
                (rate("kvasir_answers_late_total", CLASS), "late {{service_class}}"),
                (rate("kvasir_answers_expired_total", CLASS), "expired {{service_class}}"),
            ],
        ),
        ("Running", "short", [(total("kvasir_answers_running", CLASS), "{{service_class}}")]),
        ("Waiting", "short", [(total("kvasir_answers_waiting", CLASS), "{{service_class}}")]),
    ],
    "Tokens": [
        (
            "Tokens per second",
            "short",
            [
                (rate("kvasir_prompt_tokens_total"), "prompts"),
                (rate("kvasir_cached_prompt_tokens_total"), "of these cached"),
                (rate("kvasir_generated_tokens_total"), "answers"),
            ],
        ),
        (
            "Tokens under grammars",
            "short",
            [
                (rate("kvasir_masked_rows_total"), "sampled under a mask"),
                (rate("kvasir_forced_tokens_total"), "forced"),
            ],
        ),
        ("Length of prompts", "short", quantiles("kvasir_request_prompt_tokens")),
        ("Length of answers", "short", quantiles("kvasir_answer_tokens")),
    ],
    "KV memory and prefix cache": [
        (
            "KV memory in use",
            "percentunit",
            [(total("kvasir_kv_usage_ratio", "instance, model_name"), "{{model_name}}")],
        ),
        (
            "Blocks",
            "short",
            [(total("kvasir_kv_blocks"), "all"), (total("kvasir_kv_cached_blocks"), "cached prefixes alone")],
        ),
        (
            "Prefix cache",
            "percentunit",
            [
                (
                    f"{rate('kvasir_prefix_hit_tokens_total')} / {rate('kvasir_prefix_lookup_tokens_total')}",
                    "tokens found",
                )
            ],
        ),
        ("Blocks evicted", "short", [(rate("kvasir_prefix_evicted_blocks_total"), "from the prefix cache")]),
        (
            "Preemptions",
            "short",
            [
                (rate("kvasir_preemptions_total"), "for want of memory"),
                (rate("kvasir_answers_displaced_total", CLASS), "displaced {{service_class}}"),
            ],
        ),
    ],
    "Tiers": [
        ("Loads by outcome", "short", [(rate("kvasir_tier_loads_total", "tier, outcome"), "{{tier}} {{outcome}}")]),
        ("Saves by outcome", "short", [(rate("kvasir_tier_saves_total", "tier, outcome"), "{{tier}} {{outcome}}")]),
        (
            "Bytes per second",
            "Bps",
            [
                (rate("kvasir_tier_loaded_bytes_total", "tier"), "loaded {{tier}}"),
                (rate("kvasir_tier_saved_bytes_total", "tier"), "saved {{tier}}"),
            ],
        ),
        ("Bytes in tiers", "bytes", [(total("kvasir_tier_bytes", "instance, tier"), "{{instance}} {{tier}}")]),
        ("Tokens loaded", "short", [(rate("kvasir_tier_hit_tokens_total"), "tokens")]),
        ("Parts evicted", "short", [(rate("kvasir_tier_evicted_total", "tier"), "{{tier}}")]),
    ],
    "Engine": [
        ("Steps per second", "short", [(rate("kvasir_engine_steps_total", "model_name"), "{{model_name}}")]),
        (
            "Time of a step",
            "s",
            [
                (f"{rate('kvasir_engine_step_seconds_total')} / {rate('kvasir_engine_steps_total')}", "step"),
                (f"{rate('kvasir_engine_kernel_seconds_total')} / {rate('kvasir_engine_steps_total')}", "in kernels"),
            ],
        ),
        (
            "Answers ended in the engine",
            "reqps",
            [
                (rate("kvasir_engine_answers_finished_total"), "all"),
                (rate("kvasir_engine_answers_aborted_total"), "ended from outside"),
            ],
        ),
    ],
    "Operation": [
        (
            "Slow readers",
            "short",
            [
                (total("kvasir_answers_paused"), "answers paused"),
                (rate("kvasir_answer_pauses_total"), "pauses per second"),
                (rate("kvasir_http_stalled_total", labels=SERVER), "connections closed per second"),
            ],
        ),
        (
            "Files read again",
            "short",
            [(rate("kvasir_reloads_total", "file, outcome", SERVER), "{{file}} {{outcome}}")],
        ),
        ("Log lines dropped", "short", [(rate("kvasir_log_lines_dropped_total", "log", SERVER), "{{log}}")]),
    ],
}


def variable(name: str, label: str, of: str) -> dict[str, Any]:
    query = f"label_values({of}, {name if name != 'model' else 'model_name'})"
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def panels() -> Iterator[dict[str, Any]]:
    number, y = 0, 0
    for title, row in ROWS.items():
        number += 1
        place = {"h": 1, "w": 24, "x": 0, "y": y}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        y += 1
        for i, (name, unit, queries) in enumerate(row):
            number += 1
            x = i * WIDTH % 24
            place = {"h": HEIGHT, "w": WIDTH, "x": x, "y": y}
            yield panel(number, name, unit, queries, place)
            if x + WIDTH == 24 or i == len(row) - 1:
                y += HEIGHT


def panel(number: int, title: str, unit: str, queries: list[tuple[str, str]], place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expression, "legendFormat": legend, "range": True}
        for i, (expression, legend) in enumerate(queries)
    ]
    custom = {"fillOpacity": 10, "showPoints": "never"}
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def dashboard() -> dict[str, Any]:
    source = {"type": "datasource", "name": "source", "label": "Source", "query": "prometheus"}
    variables = [
        source,
        variable("job", "Job", "kvasir_http_requests_open"),
        variable("instance", "Server", 'kvasir_http_requests_open{job=~"$job"}'),
        variable("model", "Model", f"kvasir_requests_open{{{SERVER}}}"),
    ]
    return {
        "uid": "kvasir",
        "title": "Kvasir",
        "tags": ["kvasir", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": list(panels()),
    }


def main(arguments: list[str]) -> int:
    text = json.dumps(dashboard(), indent=1) + "\n"
    if arguments == ["--check"]:
        same = FILE.is_file() and FILE.read_text() == text
        print(f"{FILE}: {'as the table says' if same else 'run scripts/make_dashboard.py'}")
        return 0 if same else 1
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
