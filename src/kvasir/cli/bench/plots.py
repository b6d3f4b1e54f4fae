"""The plot of a benchmark: distributions of latencies, throughput against load, and shares of the machine's limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
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
_BLUE, _ORANGE, _GREEN, _GRAY = "#0072b2", "#d55e00", "#009e73", "#666666"  # told apart by all eyes (Okabe and Ito)
_COLOURS = (_BLUE, _ORANGE, _GREEN)
_WIDTH, _HEIGHT = 8.0, 4.2  # inches of a panel: 800 by 420 pixels of an SVG's or a browser's 100 per inch
_BELOW = {"frameon": False, "loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}  # hides no curve


def plot(
    path: Path, title: str, rows: Sequence[ReportRow], runs: Sequence[BenchRun], panels: Sequence[str] = ()
) -> None:
    """Writes a picture, of the format that the path's suffix names, of the panels for which there are figures, one
    below the other. panels: which of PANELS; all by default. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    has = {
        "latency": bool(_samples(runs)) and not _has_loads(rows),  # times at different loads are no distribution
        "load": _has_loads(rows),
        "limit": any(row.of_limit is not None for row in rows),
    }
    drawn = [PANELS[name] for name in panels or PANELS if has[name]] or [_rates]
    figure = Figure(figsize=(_WIDTH, _HEIGHT * len(drawn)), layout="constrained")
    for draw, panel in zip(drawn, figure.subplots(len(drawn), 1, squeeze=False).flat, strict=True):
        draw(panel, rows, runs)
        panel.grid(alpha=0.3)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{title}, {len(runs)} run{'s' * (len(runs) > 1)}", fontsize=11, color=_GRAY)
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)


def _has_loads(rows: Sequence[ReportRow]) -> bool:
    return any(row.name.startswith(AT) for row in rows)


def _samples(runs: Sequence[BenchRun]) -> Mapping[str, list[float]]:
    """Seconds of each time, of all requests of all runs, in ascending order."""
    found = {name: sorted(value for run in runs for value in run.samples.get(name, ())) for name in _TIMES}
    return {name: values for name, values in found.items() if values}


def _latencies(panel: Any, rows: Sequence[ReportRow], runs: Sequence[BenchRun]) -> None:
    limits = {row.name.split("_")[0]: row.limit for row in rows if row.limit}
    for colour, (name, values) in zip(_COLOURS, _samples(runs).items(), strict=False):
        shares = [100 * i / len(values) for i in range(len(values) + 1)]
        label = f"{_TIMES[name]}: median {number_text(1e3 * median(values))} ms"
        if name in limits:
            panel.axvline(1e3 * limits[name], color=colour, linestyle=":", linewidth=1.5)
            label += f", limit {number_text(1e3 * limits[name])} ms"
        panel.step([1e3 * value for value in (values[0], *values)], shares, where="post", color=colour, label=label)
    panel.set(ylim=(0, 103), ylabel="requests that took at most so long (%)")
    panel.set_xlabel(
        "milliseconds, logarithmic" + (" (dotted: the machine's limit)" if limits.keys() & _TIMES.keys() else "")
    )
    panel.set_xscale("log")
    _logarithmic(panel.xaxis)
    panel.set_title("Latency")
    panel.legend(**_BELOW)


def _logarithmic(axis: Any) -> None:
    """Ticks of a logarithmic axis at 1, 2 and 5 times each power of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:,g}")


def _load(panel: Any, rows: Sequence[ReportRow], runs: Sequence[BenchRun]) -> None:
    found = [row for row in rows if row.name.startswith(AT) and row.name.endswith("_output_tokens_per_s")]
    counts = [_requests(row.name) for row in found]
    panel.fill_between(counts, [row.min for row in found], [row.max for row in found], color=_BLUE, alpha=0.2)
    panel.plot(
        counts, [row.median for row in found], "o-", color=_BLUE, label="measured: median, and range of the runs"
    )
    if all(row.limit for row in found):
        panel.plot(counts, [row.limit for row in found], "--", color=_GRAY, label="limit of the machine")
    panel.set_xscale("log", base=2)
    panel.set_xticks(counts, [str(count) for count in counts])
    panel.set_yscale("log")
    _logarithmic(panel.yaxis)
    panel.set(xlabel="requests at once", ylabel="output tokens per second, all requests")
    panel.set_title("Throughput against load")
    panel.legend(ncols=2, **_BELOW)


def _limits(panel: Any, rows: Sequence[ReportRow], runs: Sequence[BenchRun]) -> None:
    # Rates and the times that they are computed from have the same share: the last name has it.
    found = {round(row.of_limit, 6): row for row in rows if row.of_limit and not row.name.startswith("read_")}
    shares = [100 * share for share in found][::-1]
    bars = panel.barh([_named(row.name) for row in found.values()][::-1], shares, color=_BLUE)
    panel.bar_label(bars, [f"{share:.{0 if share >= 10 else 1}f} %" for share in shares], padding=3)
    panel.axvline(100, color=_GRAY, linestyle="--", linewidth=1)
    panel.set(xlim=(0, 112), xlabel="% of what the machine's memory and arithmetic allow at most")
    panel.set_title("Share of the machine's limit")


def _rates(panel: Any, rows: Sequence[ReportRow], runs: Sequence[BenchRun]) -> None:
    """Without limits and samples: each figure's median."""
    bars = panel.barh([_named(row.name) for row in rows][::-1], [row.median for row in rows][::-1], color=_BLUE)
    panel.bar_label(bars, padding=3, fmt="%.3g")
    panel.set(xlabel="median, in the unit of the name")


PANELS: Mapping[str, Callable[[Any, Sequence[ReportRow], Sequence[BenchRun]], None]] = {
    "latency": _latencies,
    "load": _load,
    "limit": _limits,
}


def _requests(name: str) -> int:
    """at_8_output_tokens_per_s -> 8."""
    return int(name.removeprefix(AT).split("_")[0])


def _named(name: str) -> str:
    """ttft_p50_s -> "time to first token, p50"."""
    base, _, unit = name.rpartition("_")
    if base.startswith(AT):
        count = _requests(name)
        return f"{count} request{'s' * (count > 1)} at once"
    base, _, percentile = base.partition("_p") if "_p" in base and base[-1].isdigit() else (base, "", "")
    return _NAMES.get(base, f"{base.replace('_', ' ')} ({unit})") + (f", p{percentile}" if percentile else "")
