#!/usr/bin/env python3
"""Generates the Grafana dashboard of a server from the table of statistics.

    python scripts/make_dashboard.py            writes deploy/grafana/kvasir.json
    python scripts/make_dashboard.py --check    exits with 1 if the file is stale

Format: https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir.metrics import Chart, StatisticRow
from kvasir.statistics import DASHBOARD, table

FILE = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "kvasir.json"
WIDTH, HEIGHT = 8, 8  # of a panel; a row has 24 columns
SOURCE = {"type": "prometheus", "uid": "${source}"}
SERVER = 'job=~"$job", instance=~"$instance"'
MODEL = f'{SERVER}, model_name=~"$model"'
QUANTILES = (0.5, 0.95, 0.99)


# Grafana's units of Prometheus' base units: of a gauge or a histogram, and of a counter's rate.
UNITS = {"seconds": ("s", "short"), "bytes": ("bytes", "Bps"), "ratio": ("percentunit", "percentunit")}


@dataclass
class Panel:
    title: str
    unit: str
    queries: list[tuple[str, str]] = field(default_factory=list)  # expressions with their legends


def layout() -> dict[str, list[Panel]]:
    """The panels by row of the dashboard: title and unit from the first chart in the table, lines from all charts."""
    found: dict[str, dict[str, Panel]] = {title: {} for title in DASHBOARD}
    for row in table():
        for chart in row.statistic.charts:
            panel = found[chart.row].setdefault(chart.title, Panel(chart.title, unit(row, chart)))
            panel.queries += queries(row, chart)
    return {title: list(panels.values()) for title, panels in found.items()}


def unit(row: StatisticRow, chart: Chart) -> str:
    base = row.statistic.name.rpartition("_")[2]
    is_rate = row.statistic.kind == "counter" and not chart.per
    return chart.unit or UNITS.get(base, ("short", "short"))[is_rate]


def queries(row: StatisticRow, chart: Chart) -> list[tuple[str, str]]:
    name, labels = f"kvasir_{row.statistic.name}", MODEL if "model_name" in row.labels else SERVER
    each = chart.by if chart.by is not None else tuple(label for label in row.labels if label != "model_name")
    legend = " ".join(filter(None, (chart.legend, *(f"{{{{{label}}}}}" for label in each))))
    if row.statistic.kind == "histogram":
        return [(quantile(q, name, each, labels), f"p{round(q * 100)} {legend}".strip()) for q in QUANTILES]
    if row.statistic.kind == "gauge":
        return [(f"sum by ({', '.join(each)}) ({name}{{{labels}}})", legend)]
    expression = rate(f"{name}_total", each, labels)
    if chart.per:
        expression += f" / {rate(f'kvasir_{chart.per}_total', each, labels)}"
    return [(expression, legend)]


def quantile(q: float, name: str, by: tuple[str, ...], labels: str) -> str:
    return f"histogram_quantile({q}, {rate(f'{name}_bucket', ('le', *by), labels)})"


def rate(name: str, by: tuple[str, ...], labels: str) -> str:
    """The rate of a counter per second, summed over all labels except `by`."""
    return f"sum by ({', '.join(by)}) (rate({name}{{{labels}}}[$__rate_interval]))"


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
    for title, row in layout().items():
        number += 1
        place = {"h": 1, "w": 24, "x": 0, "y": y}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        y += 1
        for i, panel in enumerate(row):
            number += 1
            x = i * WIDTH % 24
            place = {"h": HEIGHT, "w": WIDTH, "x": x, "y": y}
            yield shown(number, panel, place)
            if x + WIDTH == 24 or i == len(row) - 1:
                y += HEIGHT


def shown(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expression, "legendFormat": legend, "range": True}
        for i, (expression, legend) in enumerate(panel.queries)
    ]
    custom = {"fillOpacity": 10, "showPoints": "never"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
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
        print(f"{FILE} is {'up to date' if same else 'stale; run python scripts/make_dashboard.py'}")
        return 0 if same else 1
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
