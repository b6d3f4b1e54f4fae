"""Measures a server's steps while many adapters come and go: a thousand registered, a few in memory, Zipf's popularity.

    python -m benchmarks.adapters_zipf                             1000 adapters, 64 in memory, 32 users: two minutes
    python -m benchmarks.adapters_zipf --adapters 100 --room 16 --requests 60 --layers 2      a quick look

Each of the users sends a request, waits for its answer, and sends the next, as often as `--requests` says in total. The
adapter of a request is drawn by Zipf's law: the k-th is asked for 1 / k times as often as the first. Adapters that are
not in memory are read, checked and packed by a thread of the engine while steps are computed.

Compared are the steps that only decode, for all users at once, of this run and of one in which as many adapters as fit
are asked for, so that none is loaded. The aim: no step takes more than twice the median.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks import shapes
from benchmarks.with_adapters import TARGETS, engine_of, parser, shape_of, write_adapter, write_report
from kvasir.cli.bench.probe import ForeignLoad
from kvasir.engine.core import EngineCore
from kvasir.inputs import Adapter
from kvasir.runner.runner import Runner
from kvasir.types import Request, SamplingParams, each_delta

PROMPT, TOKENS, RANK = 32, 32, 8
SLOW = 2.0  # times the median
WARM_UP = 0.1  # share of the requests before steps are counted


def registered(runner: Runner, folder: Path, config: dict[str, Any], count: int) -> list[Adapter]:
    """Random adapters, as a request has them once its names are resolved."""
    found = []
    for number in range(count):
        path = write_adapter(folder / str(number), config, TARGETS["q, v"], RANK, number)
        info = runner.read_adapter(path)
        found.append(Adapter(str(number), content=info.content, path=info.path, nbytes=info.nbytes))
    return found


def zipf(count: int, seed: int) -> Callable[[], int]:
    """Draws from 0 to count - 1, each with a weight of 1 / (1 + number)."""
    draw, weights = random.Random(seed), [1 / (1 + number) for number in range(count)]
    return lambda: draw.choices(range(count), weights)[0]


def run(core: EngineCore, adapters: Sequence[Adapter], users: int, requests: int) -> list[float]:
    """Seconds of the steps in which all users decode, and no prompt is computed."""
    draw, ids, steps = zipf(len(adapters), len(adapters)), random.Random(1), []
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, seed=0)
    begun: set[str] = set()
    sent = ended = 0

    def send() -> None:
        nonlocal sent
        prompt = tuple(ids.randrange(1000) for _ in range(PROMPT))
        core.add(Request(f"{len(adapters)} {sent}", prompt, params, adapters=(adapters[draw()],)))
        sent += 1

    for _ in range(users):
        send()
    before = time.perf_counter()
    while core.has_work():
        deltas = list(each_delta(core.advance()))
        now = time.perf_counter()
        decodes = len(deltas) == users and begun.issuperset(d.id for d in deltas)
        if decodes and ended > WARM_UP * requests:
            steps.append(now - before)
        begun.update(delta.id for delta in deltas)
        for delta in deltas:
            if delta.finish_reason:
                ended += 1
                if sent < requests:
                    send()
        before = time.perf_counter()
    return steps


def summary(core: EngineCore, steps: Sequence[float], loads: int) -> dict[str, Any]:
    middle = median(steps)
    return {
        "steps": len(steps),
        "p50_ms": 1e3 * middle,
        "p99_ms": 1e3 * quantiles(steps, n=100)[98],
        "worst_ms": 1e3 * max(steps),
        "slow": sum(step > SLOW * middle for step in steps),
        "loads": core.scheduler.adapters.loads - loads,
        "milliseconds": [round(1e3 * step, 3) for step in steps],
    }


def main() -> int:
    options = parser(__doc__, shape="qwen3-0.6b", layers=8, quantize="q4")
    options.add_argument("--adapters", type=int, default=1000)
    options.add_argument("--room", type=int, default=64, help="adapters in memory")
    options.add_argument("--requests", type=int, default=1000)
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, Path(folder))
    return int(found["zipf"]["slow"] > 0)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    config = shape_of(args)
    shapes.write(config, folder / "model")
    core, runner = engine_of(args, folder / "model", max_num_seqs=args.users, max_loras=args.room)
    others, found = ForeignLoad(), {}
    adapters = registered(runner, folder / "adapters", config, args.adapters)
    print("adapters  loads  steps  p50 ms  p99 ms  worst ms  of p50  over twice")
    for name, asked in (("fit", adapters[: args.room]), ("zipf", adapters)):
        loads = core.scheduler.adapters.loads
        row = found[name] = summary(core, run(core, asked, args.users, args.requests), loads)
        print(
            f"{len(asked):8} {row['loads']:6} {row['steps']:6} {row['p50_ms']:7.2f} {row['p99_ms']:7.2f} "
            f"{row['worst_ms']:9.2f} {row['worst_ms'] / row['p50_ms']:7.2f} {row['slow']:11}",
            flush=True,
        )
    core.close()
    print(f"other programs used {others.share():.0%} of the CPU time")
    write_report(args, "adapters-zipf", {"cases": found}, lambda figure: draw(figure, found))
    return found


def draw(figure: Any, found: dict[str, Any]) -> None:
    panel = figure.subplots()
    for name, row in found.items():
        steps = sorted(row["milliseconds"])
        panel.plot([i / len(steps) for i in range(len(steps))], steps, label=f"{name}: {row['loads']} loads")
    panel.set_xlabel("share of the steps")
    panel.set_ylabel("milliseconds of a step of all users")
    panel.legend()


if __name__ == "__main__":
    sys.exit(main())
