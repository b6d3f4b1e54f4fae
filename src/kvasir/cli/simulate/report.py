"""Turns outcomes into a table, a JSON file and a plot."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvasir.cli.show import json_text, number_text, print_table
from kvasir.cli.simulate.replica import Setup
from kvasir.cli.simulate.world import Outcome
from kvasir.errors import ConfigError

PERCENTILES = (50, 90, 99)
ENOUGH = 0.9  # of the requests, as in DistServe (arXiv:2401.09670)
PRECISION, LEAST_RATE, MOST_RATE = 0.05, 1e-3, 1e3
Row = dict[str, Any]

_COLUMNS = (
    *("policy", "rate", "asked_per_s", "goodput_per_s", "in_time", "refused", "ttft_p50_s", "ttft_p99_s"),
    *("tpot_p50_s", "tpot_p99_s", "waiting", "preemptions", "hit_rate"),
)
_PANELS = (
    ("goodput_per_s", "goodput, requests per second"),
    ("ttft_p99_s", "time to first token, p99, seconds"),
    ("tpot_p99_s", "time per output token, p99, seconds"),
    ("waiting", "waiting, mean"),
)


def summarize(setup: Setup, outcome: Outcome) -> Row:
    """A flat row of figures. goodput: requests that meet both targets, per second in which requests arrived."""
    there = [s for s in outcome.served if s is not None]
    good = sum(s.meets(setup.target) for s in there)
    span, counts = max(outcome.span, 1e-9), outcome.counts
    row: Row = {"policy": setup.name, "rate": setup.rate, "requests": len(outcome.served)}
    row |= {"asked_per_s": len(outcome.served) / span, "goodput_per_s": good / span}
    row |= {"in_time": good / len(outcome.served), "refused": len(outcome.served) - len(there)}
    for name, values in (("ttft", [s.ttft for s in there]), ("tpot", [s.tpot for s in there if s.tokens > 1])):
        found = np.percentile(values or [0.0], PERCENTILES)
        row |= {f"{name}_p{p}_s": float(v) for p, v in zip(PERCENTILES, found, strict=True)}
    row |= {"waiting": outcome.waited / max(outcome.seconds, 1e-9), "most_waiting": outcome.most_waiting}
    replicas = setup.prefill + setup.decode if setup.prefill else setup.replicas
    row |= {"replica_hours": (outcome.replica_seconds or replicas * outcome.seconds) / 3600}
    row |= {"hit_rate": counts["cached_tokens"] / max(1, counts["looked_up_tokens"])}
    return row | {"seconds": outcome.seconds, "steps": outcome.steps, **counts}


def most_in_time(served: Callable[[float], Row], start: float = 1.0) -> float:
    """The most requests per second of which ENOUGH meet both targets, within PRECISION; 0 if there is no such rate.
    served: the row of a run at a rate. start: the first rate that is tried."""
    rate, low, high, best = start, 0.0, math.inf, 0.0
    while LEAST_RATE < rate < MOST_RATE and high > low * (1 + PRECISION):
        row = served(rate)
        if row["in_time"] >= ENOUGH:
            low, best = rate, row["asked_per_s"]
        else:
            high = rate
        rate = 2 * low if math.isinf(high) else math.sqrt(low * high) if low else high / 2
    return best


def print_rows(rows: Sequence[Row], title: str) -> None:
    columns = _COLUMNS + ("loads",) * any(row["loads"] for row in rows)
    numbers = {round(3600 * row["replica_hours"] / max(row["seconds"], 1e-9), 3) for row in rows}
    columns += ("replica_hours",) * (len(numbers) > 1)
    names = [name if name == "policy" else f">{name}" for name in columns]
    print_table(names, ([_cell(row[name]) for name in columns] for row in rows), title)


def _cell(value: object) -> str:
    return number_text(value) if isinstance(value, float) else str(value)


def plot_rows(figure: Any, rows: Sequence[Row], title: str) -> None:
    """A panel for each of the main figures over the load, with a line for each policy."""
    panels = figure.subplots(1, len(_PANELS), squeeze=False).flat
    for panel, (name, label) in zip(panels, _PANELS, strict=True):
        for policy in dict.fromkeys(row["policy"] for row in rows):
            own = [row for row in rows if row["policy"] == policy]
            panel.plot([r["asked_per_s"] for r in own], [r[name] for r in own], "o-", label=policy)
        panel.set_title(label, fontsize=9)
        panel.set_xlabel("offered requests per second", fontsize=8)
        if name != "goodput_per_s":
            panel.set_yscale("symlog", linthresh=0.1)
    figure.axes[0].axline((0, 0), slope=1, color="tab:gray", linestyle="--", linewidth=1)
    figure.axes[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=9)


def write(
    out: Path,
    name: str,
    result: dict[str, Any],
    draw: Callable[[Any], None],
    size: tuple[float, float] = (13, 3.4),
) -> None:
    """Writes `name`-DATE.json and, if matplotlib is installed, `name`-DATE.png of `size` inches. Raises ConfigError if
    a file cannot be written."""
    stem = f"{name}-{time.strftime('%Y-%m-%d')}"
    write_json(out / f"{stem}.json", result)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print("no plot: matplotlib is not installed; try: pip install 'kvasir-llm[bench]'", file=sys.stderr)
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    figure.savefig(out / f"{stem}.png", dpi=120)
    print(f"wrote {out / stem}.png")


def write_json(path: Path, result: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json_text(result) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", "give another folder") from error
    print(f"wrote {path}")
