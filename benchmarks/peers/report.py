"""The results as a file, a table and a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.rows import OWN
from kvasir.cli.show import number_text, print_table


def write(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    columns = ("row", ">ours", ">best peer", ">value", ">min", ">max", ">bar", ">aim", ">of limit", "")
    print_table(columns, [_cells(row) for row in rows], "ours over theirs")


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    ours, *others = row["values"].values()
    best = max((one["median"] for one in others), default=None)
    ratio = min(row["ratios"].values(), key=lambda one: one["median"], default=None)
    low, high = (None, None) if ratio is None or row["figure"] in OWN else (ratio["min"], ratio["max"])
    verdict = "aim" if row["meets_aim"] else "bar" if row["meets_bar"] else "-" if row["value"] is None else "below"
    of_limit = f"{ours['median'] / row['limit']:.0%}" if row["limit"] else "-"
    shown = (ours["median"], best, row["value"], low, high, row["bar"], row["aim"])
    return row["name"], *("-" if value is None else number_text(value) for value in shown), of_limit, verdict


def plot(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Plots ratios with their ranges, bar and aim; figures without a peer have a separate panel.

    Raises ImportError if matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    compared = [row for row in rows if row["value"] is not None]
    groups = [[row for row in compared if (row["figure"] in OWN) == own] for own in (False, True)]
    groups = [group for group in groups if group]
    if not groups:
        return
    height = sum(len(group) for group in groups)
    figure = Figure(figsize=(9, 1.2 + 0.42 * height + 0.6 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=[len(group) + 1 for group in groups])[:, 0]
    for panel, group in zip(panels, groups, strict=True):
        _panel(panel, group)
    figure.savefig(path, dpi=120)


def _panel(panel: Any, group: Sequence[Mapping[str, Any]]) -> None:
    places = range(len(group))
    colors = ["tab:green" if r["meets_aim"] else "tab:blue" if r["meets_bar"] else "tab:red" for r in group]
    panel.barh(places, [row["value"] for row in group], color=colors, height=0.55)
    for place, row in zip(places, group, strict=True):
        for wanted, style in ((row["bar"], "-"), (row["aim"], ":")):
            panel.plot([wanted, wanted], [place - 0.4, place + 0.4], color="black", linestyle=style)
        if row["figure"] not in OWN:
            ratio = min(row["ratios"].values(), key=lambda one: one["median"])
            panel.plot([ratio["min"], ratio["max"]], [place, place], color="tab:gray", linewidth=1)
    panel.set_yticks(places, [row["name"] for row in group], fontsize=8)
    panel.invert_yaxis()
    own = group[0]["figure"] in OWN
    panel.set_xlabel("share lost, less is better" if own else "ours over the best peer (solid: bar, dotted: aim)")
