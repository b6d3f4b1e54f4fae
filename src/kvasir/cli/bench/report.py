"""Turns runs into a summary, a table, a JSON file and a plot."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from kvasir.cli.bench.measure import SEED
from kvasir.cli.bench.plots import plot
from kvasir.cli.bench.probe import ARITHMETIC_METHOD, BANDWIDTH_METHOD, Probe
from kvasir.cli.bench.rows import BenchRun, ReportRow
from kvasir.cli.show import fitted, json_text, number_text, print_table
from kvasir.errors import ConfigError


def summarize(runs: Sequence[BenchRun], limits: Mapping[str, float]) -> list[ReportRow]:
    rows = []
    for name in runs[0].figures:
        values = [run.figures[name] for run in runs]
        rows.append(ReportRow(name, median(values), min(values), max(values), limits.get(name)))
    return rows


def best_probe(runs: Sequence[BenchRun]) -> Probe:
    """The most that the machine gave: other programs only slow a probe."""
    return Probe(max(r.probe.bytes_per_s for r in runs), max(r.probe.macs_per_s for r in runs))


def print_report(title: str, rows: Sequence[ReportRow], runs: Sequence[BenchRun]) -> None:
    print_table(
        ("figure", ">median", ">min", ">max", ">limit", ">of limit"),
        (
            (
                row.name,
                *map(number_text, (row.median, row.min, row.max)),
                "-" if row.limit is None else number_text(row.limit),
                "above" if row.is_above else "-" if row.of_limit is None else f"{row.of_limit:.1%}",
            )
            for row in rows
        ),
        title,
    )
    probe, foreign = best_probe(runs), [run.foreign_cpu for run in runs]
    computes = f"computes {probe.macs_per_s * 2 / 1e9:,.0f} GFLOP/s" if probe.macs_per_s else "arithmetic not known"
    line = (
        f"\nthe machine reads {probe.bytes_per_s / 1e9:.1f} GB/s, {computes} at most; "
        f"other processes used {min(foreign):.0%} to {max(foreign):.0%} of the CPU during the runs"
    )
    print(fitted(line, sys.stdout))
    if any(row.is_above for row in rows):
        print(fitted("above: other processes slowed the probe, so its limit is too low", sys.stdout))


def as_dict(rows: Sequence[ReportRow], runs: Sequence[BenchRun], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The complete result. Units: seconds, tokens, bytes; rates per second."""
    return {
        **facts,
        "seed": SEED,
        "methods": {"bandwidth": BANDWIDTH_METHOD, "arithmetic": ARITHMETIC_METHOD},
        "figures": {row.name: {**asdict(row), "of_limit": row.of_limit} for row in rows},
        "runs": [asdict(run) for run in runs],
    }


def of_dict(result: Mapping[str, Any]) -> tuple[list[ReportRow], list[BenchRun]]:
    """What `as_dict` had."""
    rows = [
        ReportRow(name, *(row[key] for key in ("median", "min", "max", "limit")))
        for name, row in result["figures"].items()
    ]
    return rows, [BenchRun(**{**run, "probe": Probe(**run["probe"])}) for run in result["runs"]]


def write(
    out: Path, name: str, result: Mapping[str, Any], rows: Sequence[ReportRow], runs: Sequence[BenchRun]
) -> list[Path]:
    """Writes the JSON file, and the plot if matplotlib is installed; returns the paths. Raises ConfigError if a file
    cannot be written."""
    stem = re.sub(r"[^\w.-]+", "-", Path(name).name) + time.strftime("-%Y%m%d-%H%M%S")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{stem}.json").write_text(json_text(dict(result)) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}", "give another folder") from error
    written = [out / f"{stem}.json"]
    try:
        plot(out / f"{stem}.png", name, rows, runs)
        written.append(out / f"{stem}.png")
    except ImportError:
        print("no plot: matplotlib is not installed; try: pip install 'kvasir-llm[bench]'", file=sys.stderr)
    return written
