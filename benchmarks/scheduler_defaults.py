"""Goodput of candidate defaults on a trace, in virtual time: runs `kvasir simulate` once for each candidate.

    python benchmarks/scheduler_defaults.py azure_llm_2023_conv.csv --limit 3000 --rate 1,2
    python benchmarks/scheduler_defaults.py TRACE --costs costs-MODEL.json --out benchmarks/results

Each run changes one setting; the others keep their defaults. Settings are the tokens of a step, the rows, the tokens of
a block, and two constants of the policy: how many targets a request waits before it goes first (PATIENCE), and how much
longer than its decodes a step may take (STRETCH). Goodput is the number of requests that met both targets of
`interactive`, divided by the seconds in which requests arrived.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from kvasir.cli.machine import software_facts
from kvasir.cli.simulate import COSTS, read_costs, report
from kvasir.cli.simulate.replica import Setup
from kvasir.cli.simulate.trace import Prompts, read_trace
from kvasir.cli.simulate.world import World
from kvasir.sched import budget, slo

SETUPS = {"step_tokens": (512, 1024, 2048, 4096, 8192), "rows": (64, 128, 256, 512), "block_size": (16, 64, 256)}
POLICY: dict[str, tuple[ModuleType, tuple[float, ...]]] = {
    "PATIENCE": (slo, (2.0, 5.0, 20.0)),
    "STRETCH": (budget, (1.5, 2.0, 4.0)),
}


@contextmanager
def changed(module: ModuleType, name: str, value: float) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rate", default="1", help="speed relative to the trace; comma-separated list")
    parser.add_argument("--costs", help="see `kvasir simulate --costs`")
    parser.add_argument("--limit", type=int, help="use only the first requests of the trace")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    args = parser.parse_args()
    asked = read_trace(args.trace, args.limit)
    prompts, costs = Prompts(asked), read_costs(args.costs) if args.costs else COSTS
    rows: list[dict[str, Any]] = []

    def serve(name: str, value: float, setup: Setup) -> None:
        row = report.summarize(setup, World(asked, setup, prompts).run())
        rows.append({"setting": name, "value": value, **row})
        figures = (f"{name} {value:g}", row["rate"], row["goodput_per_s"], row["ttft_p99_s"], row["tpot_p99_s"])
        print(
            "{:20} rate {:<5g} goodput {:7.3f}/s  ttft p99 {:8.3f} s  tpot p99 {:7.4f} s".format(*figures), flush=True
        )

    for rate in map(float, args.rate.split(",")):
        base = Setup("ours", costs, rate)
        for name, values in SETUPS.items():
            for value in values:
                serve(name, value, replace(base, **{name: value}))
        for name, (module, values) in POLICY.items():
            for value in values:
                with changed(module, name, value):
                    serve(name, value, base)
    if args.out:
        facts = {"trace": args.trace.name, "requests": len(asked), "costs": costs, "software": software_facts()}
        report.write_json(args.out / f"defaults-{args.trace.stem}.json", {**facts, "rows": rows})


if __name__ == "__main__":
    main()
