"""Measures what adapters cost: steps of many users, each with an adapter of its own, against those of the base model.

    python -m benchmarks.adapters                                      llama-1b in bfloat16, then all of its linears
    python -m benchmarks.adapters --shape qwen3-0.6b --quantize q8
    python -m benchmarks.adapters --model /tmp/llama-1b --rounds 99 --out benchmarks/results
    python -m benchmarks.adapters --shape qwen3-0.6b --layers 4 --rounds 9     a quick look

Adapters are written in peft's form with random numbers, and read and packed as those of users are. A step computes one
token of each user. A round is a step of each kind, one directly after the other, so that what else the machine does
disturbs both; the figures are medians over the rounds of their ratios and differences. `moved` are the bytes of the
matrices that the step's rows read once, `limit` the time that the machine takes for them at its bandwidth (the best of
the probes before and after), and `added` the time that the step takes longer. The aims: at rank 16 on q and v at least
0.85 of the base model's throughput, and on all linears at most 1.3 of the limit added.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import shapes
from benchmarks.with_adapters import TARGETS, engine_of, parser, shape_of, write_adapter, write_report
from kvasir.cli.bench.probe import ForeignLoad, probe
from kvasir.plan import Adapted, Decodes, Join, SamplingSpec, StepPlan, Work, pack_ids
from kvasir.runner.runner import Runner

AIMS = {"q, v": ("ratio", 0.85), "all": ("of_limit", 1.3)}
PROMPT, SEEN = 16, 1000  # tokens of a prompt, and the ids that occur


# --- adapters ---------------------------------------------------------------------------------------


def moved_bytes(config: dict[str, Any], targets: Sequence[str], rank: int) -> int:
    """Bytes of one adapter's matrices."""
    found = ((name.removesuffix(".weight"), shape) for name, shape in shapes.tensor_shapes(config))
    return sum(2 * rank * sum(shape) for module, shape in found if module.rpartition(".")[2] in targets)


def load(runner: Runner, paths: Sequence[str]) -> float:
    """Gives the runner adapters 1, 2, ...; returns the seconds that one took."""
    begun = time.perf_counter()
    for id, path in enumerate(paths, 1):
        info = runner.read_adapter(path)
        runner.set_adapter(id, runner.pack_adapter(path, info.content))
    return (time.perf_counter() - begun) / len(paths)


# --- steps ------------------------------------------------------------------------------------------


class Users:
    """Rows of a runner, from `first` on, that decode together with these adapters, 0 for none."""

    def __init__(self, runner: Runner, first: int, adapters: Sequence[int], tokens: int):
        self.runner, self.rows = runner, range(first, first + len(adapters))
        capacity = runner.capacity
        blocks = -(-(PROMPT + tokens + 1) // capacity.block_size)
        joined, works = [], []
        for row, adapter in zip(self.rows, adapters, strict=True):
            ids = pack_ids([(31 * (row - first) + 7 * i) % SEEN for i in range(PROMPT)])
            joined.append(Join(row, ids, PROMPT, SamplingSpec(), (Adapted(adapter),) if adapter else ()))
            table = tuple(range(1 + row * blocks, 1 + (row + 1) * blocks))
            works.append(Work(row, 0, PROMPT, tuple((0, table) for _ in capacity.groups), sample=True))
        self._step(tuple(joined), work=tuple(works))
        self.known = PROMPT

    def step(self) -> float:
        """One token of each user. Returns the milliseconds in the native call."""
        rows, starts = np.array(self.rows, np.int32), np.full(len(self.rows), self.known, np.int32)
        self.known += 1
        return self._step(decodes=Decodes(rows.tobytes(), starts.tobytes()))

    def leave(self) -> None:
        self._step(left=tuple(self.rows))

    def _step(self, joined: tuple = (), **parts: Any) -> float:
        before = self.runner.kernel_seconds
        result = self.runner.sample(self.runner.execute(StepPlan(0, joined, **parts)))
        if errors := [row.error for row in (*result.rows, *result.failed) if row.error]:
            raise RuntimeError(errors[0])
        return 1e3 * (self.runner.kernel_seconds - before)


def compared(runner: Runner, users: int, rounds: int) -> list[tuple[float, float]]:
    """Milliseconds of steps one after the other, of the base model and with adapters; in every second round in the
    other order."""
    base = Users(runner, 0, [0] * users, rounds + 2)
    adapted = Users(runner, users, range(1, users + 1), rounds + 2)
    base.step(), adapted.step()
    runs = []
    for turn in range(rounds):
        first = base.step() if turn % 2 else adapted.step()
        second = adapted.step() if turn % 2 else base.step()
        runs.append((first, second) if turn % 2 else (second, first))
    base.leave()
    adapted.leave()
    return runs


def summary(runs: Sequence[tuple[float, float]], moved: int, bandwidth: float) -> dict[str, Any]:
    """bandwidth: bytes per second."""
    limit = 1e3 * moved / bandwidth
    added = median(adapted - base for base, adapted in runs)
    return {
        "base_ms": median(base for base, _ in runs),
        "adapted_ms": median(adapted for _, adapted in runs),
        "ratio": median(base / adapted for base, adapted in runs),
        "added_ms": added,
        "moved_bytes": moved,
        "limit_ms": limit,
        "of_limit": added / limit,
        "runs": runs,
    }


def misses(name: str, row: dict[str, Any]) -> bool:
    what, aim = AIMS[name]
    return row[what] < aim if what == "ratio" else row[what] > aim


def main() -> int:
    options = parser(__doc__, shape="llama-1b", layers=None, quantize=None)
    options.add_argument("--model", type=Path, help="a folder that shapes.py has written, instead of making one")
    options.add_argument("--rank", type=int, default=16)
    options.add_argument("--targets", action="append", choices=TARGETS, help="measure only these matrices; repeatable")
    options.add_argument("--rounds", type=int, default=60)
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, Path(folder))
    return int(any(misses(name, row) for name, row in found.items()))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    config = shape_of(args)
    if not args.model:
        shapes.write(config, folder / "model")
    else:
        config = json.loads((args.model / "config.json").read_text())
    most = max(512, args.users * PROMPT)
    model = args.model or folder / "model"
    core, runner = engine_of(args, model, max_num_seqs=2 * args.users, max_num_batched_tokens=most)
    others, found = ForeignLoad(), {}
    threads = runner.executor.program.pool.threads  # type: ignore[attr-defined]
    print("matrices  base ms     with  ratio  moved MB  limit ms  added  / limit")
    for name in args.targets or TARGETS:
        paths = [write_adapter(folder / name / str(i), config, TARGETS[name], args.rank, i) for i in range(args.users)]
        load_seconds = load(runner, paths)
        moved = args.users * moved_bytes(config, TARGETS[name], args.rank)
        before = probe("cpu", "bfloat16", threads).bytes_per_s
        runs = compared(runner, args.users, args.rounds)
        bandwidth = max(before, probe("cpu", "bfloat16", threads).bytes_per_s)
        row = summary(runs, moved, bandwidth)
        found[name] = {**row, "bandwidth": bandwidth, "load_seconds": load_seconds}
        print(
            f"{name:8} {row['base_ms']:8.2f} {row['adapted_ms']:8.2f} {row['ratio']:6.3f} {moved / 1e6:9.1f} "
            f"{row['limit_ms']:9.2f} {row['added_ms']:6.2f} {row['of_limit']:8.2f}"
            + ("  misses the aim" if misses(name, row) else ""),
            flush=True,
        )
    core.close()
    print(f"other programs used {others.share():.0%} of the CPU time")
    write_report(args, "adapters", {"threads": threads, "cases": found}, lambda figure: draw(figure, found))
    return found


def draw(figure: Any, found: dict[str, Any]) -> None:
    panel = figure.subplots()
    for place, what in enumerate(("base_ms", "adapted_ms")):
        heights = [row[what] for row in found.values()]
        panel.bar([i + 0.4 * place for i in range(len(found))], heights, 0.4, label=what)
    panel.set_xticks(range(len(found)), list(found))
    panel.set_ylabel("milliseconds of a step")
    panel.legend()


if __name__ == "__main__":
    sys.exit(main())
