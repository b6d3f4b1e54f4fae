"""Fleets in virtual time: routers, separate prefill and decode, numbers of replicas that follow the load, and how well
the coarse simulation agrees.

    python benchmarks/fleet_simulation.py agreement TRACE      coarse replicas against the real scheduler
    python benchmarks/fleet_simulation.py routers TRACE        hits and goodput of each router, 8 replicas
    python benchmarks/fleet_simulation.py ratios TRACE         5 engines: whole replicas, and every ratio of P to D
    python benchmarks/fleet_simulation.py day TRACE            1,000 replicas and a day of traffic
    python benchmarks/fleet_simulation.py autoscale TRACE      a day with 1 to 8 replicas, and with fixed numbers

TRACE: as for `kvasir simulate`. --limit: only its first requests. --out: folder for the JSON and the plot. The costs
are those that `kvasir simulate` assumes (roughly an 8B model on a large GPU), or --costs; --slower multiplies them, so
that many replicas have enough to do. A day has two peaks of twice the load at night, and its prompts share prefixes
only within a copy of the trace.

`ratios` and `routers` find the rate at which 90 % of the requests meet both targets, with coarse replicas. With
--check, `ratios` then serves the best two of these targets at that rate with the real scheduler.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from kvasir.cli.machine import machine_facts, software_facts
from kvasir.cli.simulate import COSTS, divisions, read_costs, report, world_of
from kvasir.cli.simulate.replica import Setup
from kvasir.cli.simulate.trace import Asked, Prompts, read_trace
from kvasir.fleet.autoscale import Limits
from kvasir.fleet.cost import POLICIES
from kvasir.types import Target

DAY = 86_400.0
START = 30.0  # seconds in which a replica starts
SHOWN = ("asked_per_s", "goodput_per_s", "in_time", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "hit_rate")


def served(asked: list[Asked], setup: Setup, coarse: bool, prompts: Prompts | None = None) -> report.Row:
    begun = time.perf_counter()
    outcome = world_of(asked, setup, coarse, prompts).run()
    row = report.summarize(setup, outcome) | {"coarse": coarse, "real_seconds": time.perf_counter() - begun}
    figures = "  ".join(f"{name} {row[name]:.3g}" for name in SHOWN)
    print(f"{'coarse' if coarse else 'exact':<7}{row['policy']:<20} x{setup.rate:<5g} {figures}", flush=True)
    return row


def most(asked: list[Asked], setup: Setup, start: float = 1.0) -> tuple[float, report.Row]:
    """The most requests per second in time, and the row of that run. start: the first rate that is tried."""
    rows: list[report.Row] = []

    def run(rate: float) -> report.Row:
        rows.append(served(asked, replace(setup, rate=rate), True))
        return rows[-1]

    found = report.most_in_time(run, start)
    best = next((row for row in reversed(rows) if row["asked_per_s"] == found), rows[-1])
    print(f"{setup.name}: {report.ENOUGH:.0%} in time up to {found:.3g} requests/s", flush=True)
    return found, best


def agreement(asked: list[Asked], base: Setup, rates: list[float]) -> Iterator[report.Row]:
    prompts = Prompts(asked)
    for rate in rates:
        for coarse in (False, True):
            yield served(asked, replace(base, replicas=4, rate=rate), coarse, prompts)


def routers(asked: list[Asked], base: Setup, rates: list[float]) -> Iterator[report.Row]:
    """Each router at each rate, and the most requests per second in time."""
    best: report.Row = {}
    for router in POLICIES:
        setup = replace(base, router=router)
        found, best = most(asked, setup, best["rate"] if best else 1.0)
        at_rates = [served(asked, replace(setup, rate=rate), True) for rate in rates]
        yield {"router": router, "goodput_per_s": found, "hit_rate": best["hit_rate"], "rows": at_rates}


def ratios(asked: list[Asked], base: Setup, tpots: list[float], checked: list[float]) -> Iterator[report.Row]:
    """The most requests per second in time, of whole replicas and of each ratio, for each target. checked: targets
    whose best two are also served by the real scheduler."""
    prompts, found = Prompts(asked), dict[str, tuple[float, report.Row]]()
    for tpot in tpots:
        setups = {s.name: s for s in divisions(replace(base, target=Target(base.target.ttft, tpot)))}
        for name, setup in setups.items():
            found[name] = most(asked, setup, found[name][1]["rate"] if name in found else 1.0)
            yield {"tpot_target_s": tpot, "setup": name, "coarse": True, "goodput_per_s": found[name][0]}
        best = sorted(found, key=lambda name: -found[name][0])[:2] if tpot in checked else []
        for name in best:
            setup = replace(setups[name], rate=found[name][1]["rate"])
            yield {"tpot_target_s": tpot, "setup": name, **served(asked, setup, False, prompts)}


def plot_ratios(figure: Any, rows: list[report.Row], title: str) -> None:
    """Goodput over the target for the time per token, a line for each setup."""
    axes = figure.subplots()
    for name in dict.fromkeys(row["setup"] for row in rows):
        own = [row for row in rows if row["setup"] == name and row["coarse"]]
        style = "-" if "P" in name else "--"
        label = name.split()[0] if "P" in name else f"{name.split()[0].rstrip('x')} whole replicas"
        axes.plot([1000 * r["tpot_target_s"] for r in own], [r["goodput_per_s"] for r in own], f"o{style}", label=label)
    targets = sorted({1000 * row["tpot_target_s"] for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(targets, [f"{target:g}" for target in targets])
    axes.minorticks_off()
    axes.set_xlabel("target for the time per token, ms")
    axes.set_ylabel("requests per second, 90 % in time")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    axes.set_title(title, fontsize=9)


def a_day(trace: list[Asked], rate: float) -> list[Asked]:
    """Copies of the trace through a day, at `rate` requests per second on average. Each copy has its own blocks."""
    blocks = 1 + max((max(a.blocks, default=-1) for a in trace), default=-1)
    found: list[Asked] = []
    for copy in count():
        for asked in trace:
            number = len(found)
            if number >= rate * DAY:
                return found
            shifted = tuple(block + copy * blocks for block in asked.blocks)
            found.append(Asked(_moment(number / (rate * DAY)), asked.prompt, asked.answer, shifted))
    raise AssertionError


def _moment(share: float) -> float:
    """When this share of the day's requests has arrived: the load is 1 - cos(4 pi t) / 3 of the average."""
    t = share
    for _ in range(30):
        t -= (t - math.sin(4 * math.pi * t) / (12 * math.pi) - share) / (1 - math.cos(4 * math.pi * t) / 3)
    return t * DAY


def slower(setup: Setup, factor: float) -> Setup:
    """The setup on replicas that take so many times as long."""
    a, b, c, d = (factor * cost for cost in setup.costs)
    return replace(setup, costs=(a, b, c, d))


def autoscale(day: list[Asked], base: Setup, largest: int) -> Iterator[report.Row]:
    """1 to `largest` replicas, or none; then the fixed numbers from their mean on."""
    mean = 1
    for least in (0, 1):
        row = served(day, replace(base, limits=Limits(least, largest), start=START), True)
        mean = round(3600 * row["replica_hours"] / row["seconds"])
        print(f"  {row['replica_hours']:.1f} replica-hours", flush=True)
        yield row
    for number in range(max(1, mean), largest + 1):
        yield served(day, replace(base, replicas=number), True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("agreement", "routers", "ratios", "day", "autoscale"))
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rate", default="1", help="speed relative to the trace; comma-separated list")
    parser.add_argument("--limit", type=int, help="use only the first requests of the trace")
    parser.add_argument("--memory", type=int, default=400_000, help="tokens of each replica's cache")
    parser.add_argument("--costs", help="as for kvasir simulate")
    parser.add_argument("--ttft", type=float, default=2.0, help="target: seconds to the first token")
    parser.add_argument("--tpot", default="0.1", help="target: seconds per further token; ratios: comma-separated list")
    parser.add_argument("--check", default="", help="ratios: list of those targets to check with the real scheduler")
    parser.add_argument("--replicas", type=int, help="default: 8; ratios: 5; day: 1000")
    parser.add_argument("--load", type=float, default=40.0, help="day, autoscale: requests per second on average")
    parser.add_argument("--slower", type=float, default=1.0, help="factor of all costs")
    parser.add_argument("--router", default="cost", help="day: comma-separated list")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    args = parser.parse_args()
    asked, rates = read_trace(args.trace, args.limit), [float(rate) for rate in args.rate.split(",")]
    tpots = [float(tpot) for tpot in args.tpot.split(",")]
    base = Setup("ours", read_costs(args.costs) if args.costs else COSTS, memory=args.memory, max_waiting=len(asked))
    base = slower(replace(base, target=Target(args.ttft, tpots[0])), args.slower)
    base = replace(base, replicas=args.replicas or {"ratios": 5, "day": 1000}.get(args.what, 8))
    rows: list[dict[str, Any]] = []
    if args.what == "agreement":
        rows += agreement(asked, base, rates)
    elif args.what == "routers":
        rows += routers(asked, base, rates)
    elif args.what == "ratios":
        rows += ratios(asked, base, tpots, [float(tpot) for tpot in args.check.split(",") if tpot])
    elif args.what == "autoscale":
        rows += autoscale(a_day(asked, args.load), base, base.replicas)
    else:
        day = a_day(asked, args.load)
        for router in args.router.split(","):
            rows.append(served(day, replace(base, router=router), True))
            print(f"  {len(day)} requests, {base.replicas} replicas: {rows[-1]['real_seconds']:.0f} s", flush=True)
    if args.out:
        facts = {"trace": args.trace.name, "requests": len(asked), "options": options_of(args), "costs": base.costs}
        facts |= {"machine": machine_facts(), "software": software_facts(), "rows": rows}
        name = f"fleet-{args.what}-{args.trace.stem}"
        if args.what == "ratios":
            title = f"{args.trace.stem}: {base.replicas} engines, first token within {args.ttft:g} s"
            report.write(args.out, name, facts, lambda figure: plot_ratios(figure, rows, title), (6.0, 3.6))
        else:
            report.write_json(args.out / f"{name}-{time.strftime('%Y-%m-%d')}.json", facts)


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options, but for folders."""
    return {name: value for name, value in vars(args).items() if not isinstance(value, Path)}


if __name__ == "__main__":
    main()
