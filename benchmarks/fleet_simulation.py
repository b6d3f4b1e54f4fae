"""Fleets in virtual time: routers, separate prefill and decode, and how well the coarse simulation agrees.

    python benchmarks/fleet_simulation.py agreement TRACE      coarse replicas against the real scheduler
    python benchmarks/fleet_simulation.py routers TRACE        hits and goodput of each router, 8 replicas
    python benchmarks/fleet_simulation.py ratios TRACE         5 engines: whole replicas, and every ratio of P to D
    python benchmarks/fleet_simulation.py day TRACE            1,000 replicas and a day of traffic

TRACE: as for `kvasir simulate`. --limit: only its first requests. --out: folder for the JSON. The costs are those that
`kvasir simulate` assumes (roughly an 8B model on a large GPU); for `day` they are `--slower` times as high, so that a
thousand replicas have enough to do. Its load has two peaks of twice the load at night, and its prompts share prefixes
only within a copy of the trace.
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
from kvasir.cli.simulate import COSTS, report
from kvasir.cli.simulate.coarse_world import CoarseWorld
from kvasir.cli.simulate.replica import Setup
from kvasir.cli.simulate.trace import Asked, Prompts, read_trace
from kvasir.cli.simulate.world import World
from kvasir.fleet.cost import POLICIES

DAY = 86_400.0
SHOWN = ("asked_per_s", "goodput_per_s", "in_time", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "hit_rate")


def served(asked: list[Asked], setup: Setup, coarse: bool, prompts: Prompts | None = None) -> report.Row:
    begun = time.perf_counter()
    world = CoarseWorld(asked, setup) if coarse else World(asked, setup, prompts)
    row = report.summarize(setup, world.run()) | {"coarse": coarse, "real_seconds": time.perf_counter() - begun}
    figures = "  ".join(f"{name} {row[name]:.3g}" for name in SHOWN)
    print(f"{'coarse' if coarse else 'exact':<7}{row['policy']:<20} x{setup.rate:<5g} {figures}", flush=True)
    return row


def agreement(asked: list[Asked], base: Setup, rates: list[float]) -> Iterator[report.Row]:
    prompts = Prompts(asked)
    for rate in rates:
        for coarse in (False, True):
            yield served(asked, replace(base, replicas=4, rate=rate), coarse, prompts)


def routers(asked: list[Asked], base: Setup, rates: list[float], coarse: bool) -> Iterator[report.Row]:
    prompts = Prompts(asked)
    for rate in rates:
        for router in POLICIES:
            yield served(asked, replace(base, replicas=8, router=router, rate=rate), coarse, prompts)


def ratios(asked: list[Asked], base: Setup, engines: int = 5) -> Iterator[report.Row]:
    """The most requests per second in time, of whole replicas and of each ratio."""
    prompts = Prompts(asked)
    setups = [replace(base, replicas=engines)]
    setups += [replace(base, prefill=p, decode=engines - p) for p in range(1, engines)]
    for setup in setups:
        rows: list[report.Row] = []

        def run(rate: float, setup: Setup = setup, rows: list[report.Row] = rows) -> report.Row:
            rows.append(served(asked, replace(setup, rate=rate), False, prompts))
            return rows[-1]

        most = report.most_in_time(run)
        print(f"{setup.name}: {report.ENOUGH:.0%} in time up to {most:.3g} requests/s", flush=True)
        yield {"setup": setup.name, "goodput_per_s": most, "rows": rows}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("agreement", "routers", "ratios", "day"))
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rate", default="1", help="speed relative to the trace; comma-separated list")
    parser.add_argument("--limit", type=int, help="use only the first requests of the trace")
    parser.add_argument("--memory", type=int, default=400_000, help="tokens of each replica's cache")
    parser.add_argument("--exact", action="store_true", help="routers: with the real scheduler")
    parser.add_argument("--replicas", type=int, default=1000, help="day: replicas")
    parser.add_argument("--load", type=float, default=40.0, help="day: requests per second on average")
    parser.add_argument("--slower", type=float, default=10.0, help="day: factor of all costs")
    parser.add_argument("--router", default="cost", help="day: comma-separated list")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    args = parser.parse_args()
    asked, rates = read_trace(args.trace, args.limit), [float(rate) for rate in args.rate.split(",")]
    base = Setup("ours", COSTS, memory=args.memory, max_waiting=len(asked))
    rows: list[dict[str, Any]] = []
    if args.what == "agreement":
        rows += agreement(asked, base, rates)
    elif args.what == "routers":
        rows += routers(asked, base, rates, not args.exact)
    elif args.what == "ratios":
        rows += ratios(asked, base)
    else:
        day = a_day(asked, args.load)
        a, b, c, d = (args.slower * cost for cost in COSTS)
        for router in args.router.split(","):
            rows.append(served(day, replace(base, costs=(a, b, c, d), replicas=args.replicas, router=router), True))
            print(f"  {len(day)} requests, {args.replicas} replicas: {rows[-1]['real_seconds']:.0f} s", flush=True)
    if args.out:
        facts = {"trace": args.trace.name, "requests": len(asked), "machine": machine_facts()}
        facts |= {"software": software_facts(), "rows": rows}
        name = f"fleet-{args.what}-{args.trace.stem}-{time.strftime('%Y-%m-%d')}.json"
        report.write_json(args.out / name, facts)


if __name__ == "__main__":
    main()
