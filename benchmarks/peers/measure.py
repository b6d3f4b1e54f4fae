"""Measures one row: the engines in turn on the same prompts, the machine's rates in each round, and the ratios."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from benchmarks.peers.crew import Contestant, Crew, contestants
from benchmarks.peers.engines import Setup
from benchmarks.peers.limits import limit, work_of
from benchmarks.peers.places import AnswersTooShort
from benchmarks.peers.probe import Foreign, rates
from benchmarks.peers.prompts import prompts_of, value_of
from benchmarks.peers.rows import OURS, Row
from benchmarks.peers.servers import Server

PAUSE = 0.3  # seconds, for threads that spin before they sleep


def compare(
    row: Row, crew: Crew, rows: Iterable[Row], rounds: int, tell: Callable[[str], None] = print
) -> dict[str, Any]:
    """The row's entry in the results. tell: prints a message. Raises PeerError if Kvasir cannot be measured."""
    found, missing = contestants(row, crew, rows)
    for name, reason in missing.items():
        tell(f"  without {name}: {reason}")
    try:
        row, runs = _rounds(row, crew.setup, found, rounds, tell)
        engines = {one.name: {**one.facts, "peak_rss": one.peak_rss} for one in found}
    finally:
        for one in found:
            if isinstance(one, Server):
                one.close()
    return summary(row, [one.name for one in found], runs) | {"engines": engines, "missing": missing}


def _rounds(
    row: Row, setup: Setup, found: Sequence[Contestant], count: int, tell: Callable[[str], None]
) -> tuple[Row, list[dict[str, Any]]]:
    """All rounds with the same number of new tokens: the row's, or as many as needed to measure every engine."""
    longest = row.longest
    while True:
        try:
            return row, [_round(row, setup, found, number) for number in range(count)]
        except AnswersTooShort as error:
            if 2 * row.new > longest:
                raise
            row = replace(row, new=2 * row.new)
            tell(f"  {error}; repeating all engines with {row.new} new tokens")


def _round(row: Row, setup: Setup, found: Sequence[Contestant], number: int) -> dict[str, Any]:
    """Every second round runs in reverse order, so that a drift of the machine favours no engine."""
    model = setup.file(OURS, row)
    prompts, gave = prompts_of(row, number, work_of(model)[1].vocab_size), rates(setup.threads)
    figures, foreign = {}, {}
    for one in found if number % 2 == 0 else reversed(found):
        time.sleep(PAUSE)
        others = Foreign(one.pids)
        figures[one.name] = one.measure(row, prompts, row.new)
        foreign[one.name] = others.share()
    values = {name: value_of(row, reported, row.new) for name, reported in figures.items()}
    return {
        "values": values, "figures": figures, "foreign_cpu": foreign, "machine": asdict(gave),
        "limit": limit(row, model, gave),
    }  # fmt: skip


def summary(row: Row, names: Sequence[str], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """names: Kvasir first. `value` is compared with bar and aim: the ratio to the better peer, or a share."""
    ours, *others = names
    values = {name: spread([run["values"][name] for run in runs]) for name in names}
    ratios = {}
    for name in others:
        ratios[name] = spread([run["values"][ours] / run["values"][name] for run in runs])
        ratios[name]["of_medians"] = values[ours]["median"] / values[name]["median"]
    value: float | None
    match row.figure:
        case "overhead":
            value = values[ours]["median"]
        case "sampling":
            value = ratios[others[0]]["median"] - 1
        case _:
            value = min((ratio["median"] for ratio in ratios.values()), default=None)
    limits = [run["limit"] for run in runs if run["limit"]]
    return {
        **asdict(row), "values": values, "ratios": ratios, "value": value, "limit": median(limits) if limits else None,
        "meets_bar": _meets(row, value, row.bar, runs, ours), "meets_aim": _meets(row, value, row.aim, runs, ours),
        "rounds": list(runs),
    }  # fmt: skip


def _meets(row: Row, value: float | None, wanted: float, runs: Sequence[Mapping[str, Any]], ours: str) -> bool | None:
    """Whether the value reaches `wanted`; over HTTP, also whether the slowest streams are faster than the peers'. None
    if there is no value."""
    if value is None:
        return None
    if row.figure != "http":
        return row.met(value, wanted)
    slow = {name: median(run["figures"][name]["tpot_p99_s"] for run in runs) for name in runs[0]["figures"]}
    return row.met(value, wanted) and slow[ours] < min(v for name, v in slow.items() if name != ours)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}
