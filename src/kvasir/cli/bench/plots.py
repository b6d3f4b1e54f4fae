"""The plot of a benchmark: distributions of latencies, throughput against load, and shares of the machine's limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvasir.cli.bench.measure import AT
from kvasir.cli.bench.rows import BenchRun, ReportRow
from kvasir.cli.show import number_text

# Name of a time -> what it is, for people.
_TIMES = {"ttft": "first token", "tpot": "each later token", "e2e": "whole answer"}
_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per token",
    "e2e": "time of an answer",
    "duration": "duration",
    "requests_per": "requests per second",
    "prompt_tokens_per": "prompt tokens per second",
    "output_tokens_per": "output tokens per second",
    "read_gb_per": "memory read per second",
}
_BLUE, _GRAY = "tab:blue", "tab:gray"
_BELOW = {"fontsize": 8, "frameon": False, "loc": "upper center", "bbox_to_anchor": (0.5, -0.15)}  # hides no curve
_COLOURS = ("tab:blue", "tab:orange", "tab:green")


def plot(path: Path, title: str, rows: Sequence[ReportRow], runs: Sequence[BenchRun]) -> None:
    """Writes a PNG with the panels for which there are figures. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    limits = [row for row in rows if row.of_limit is not None]
    panels = [
        (_latencies, bool(_samples(runs))),
        (_load, any(row.name.startswith(AT) for row in rows)),
        (_limits, bool(limits)),
    ]
    drawn = [draw for draw, has in panels if has] or [_rates]
    figure = Figure(figsize=(6 * len(drawn), 4.2), layout="constrained")
    for draw, panel in zip(drawn, figure.subplots(1, len(drawn), squeeze=False).flat, strict=True):
        draw(panel, rows, runs)
    figure.suptitle(f"{title}, {len(runs)} run{'s' * (len(runs) > 1)}")
    figure.savefig(path, dpi=120)


def _samples(runs: Sequence[BenchRun]) -> Mapping[str, list[float]]:
    """Seconds of each time, of all requests of all runs, in ascending order."""
    found = {name: sorted(value for run in runs for value in run.samples.get(name, ())) for name in _TIMES}
    return {name: values for name, values in found.items() if values}


def _latencies(panel: Any, rows: Sequence[ReportRow], runs: Sequence[BenchRun]) -> None:
    limits = {row.name.split("_")[0]: row.limit for row in rows if row.limit}
    for colour, (name, values) in zip(_COLOURS, _samples(runs).items(), strict=False):
        shares = [100 * (i + 1) / len(values) for i in range(len(values))]
        middle = 1e3 * values[len(values) // 2]
        label = f"{_TIMES[name]} (median {number_text(middle)} ms)"
        panel.step([1e3 * value for value in values], shares, where="post", color=colour, label=label)
        if name in limits:
            panel.axvline(1e3 * limits[name], color=colour, linestyle=":", linewidth=1)
    dotted = " (dotted: the machine's limit)" if limits.keys() & _TIMES.keys() else ""
    panel.set(xscale="log", ylim=(0, 103), xlabel=f"milliseconds{dotted}", ylabel="% of requests")
    panel.xaxis.set_major_formatter("{x:,g}")
    panel.set_title("Latency: share of requests that took at most so long", fontsize=10)
    _finish(panel)
    panel.legend(**_BELOW)


def _load(panel: Any, rows: Sequence[ReportRow], runs: Sequence[BenchRun]) -> None:
    found = [row for row in rows if row.name.startswith(AT) and row.name.endswith("_output_tokens_per_s")]
    counts = [int(row.name.removeprefix(AT).split("_")[0]) for row in found]
    panel.fill_between(counts, [row.min for row in found], [row.max for row in found], color=_BLUE, alpha=0.2)
    panel.plot(counts, [row.median for row in found], "o-", color=_BLUE, label="measured (median, and its range)")
    if all(row.limit for row in found):
        panel.plot(counts, [row.limit for row in found], "--", color=_GRAY, label="limit of the machine")
    panel.set_xscale("log", base=2)
    panel.set_xticks(counts, [str(count) for count in counts])
    panel.set(ylim=(0, None), xlabel="requests at once", ylabel="output tokens per second, of all requests")
    panel.set_title("Throughput against load", fontsize=10)
    _finish(panel)
    panel.legend(**_BELOW)


def _limits(panel: Any, rows: Sequence[ReportRow], runs: Sequence[BenchRun]) -> None:
    found = [row for row in rows if row.of_limit is not None][::-1]
    shares = [100 * (row.of_limit or 0) for row in found]
    bars = panel.barh([_named(row.name) for row in found], shares, color=_BLUE)
    panel.bar_label(bars, [f"{share:.0f} %" for share in shares], padding=3, fontsize=8)
    panel.axvline(100, color=_GRAY, linestyle="--", linewidth=1)
    panel.set(xlim=(0, max(115, *(1.15 * share for share in shares))), xlabel="% of what the machine's memory and "
              "arithmetic allow")  # fmt: skip
    panel.set_title("Share of the machine's limit", fontsize=10)
    panel.tick_params(axis="y", labelsize=8)
    _finish(panel)


def _rates(panel: Any, rows: Sequence[ReportRow], runs: Sequence[BenchRun]) -> None:
    """Without limits and samples: each figure's median."""
    bars = panel.barh([_named(row.name) for row in rows][::-1], [row.median for row in rows][::-1], color=_BLUE)
    panel.bar_label(bars, padding=3, fontsize=8, fmt="%.3g")
    panel.set(xlabel="median, in the unit of the name")
    _finish(panel)


def _named(name: str) -> str:
    """ttft_p50_s -> "time to first token, p50"."""
    base, _, unit = name.rpartition("_")
    load = ""
    if base.startswith(AT):
        count, _, base = base.removeprefix(AT).partition("_")
        load = f", {count} at once"
    base, _, percentile = base.partition("_p") if "_p" in base and base[-1].isdigit() else (base, "", "")
    return _NAMES.get(base, f"{base.replace('_', ' ')} ({unit})") + (f", p{percentile}" if percentile else "") + load


def _finish(panel: Any) -> None:
    panel.grid(alpha=0.3)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
