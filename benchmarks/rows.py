"""CPU time per token of the scheduler and of a runner's bookkeeping, by number of rows that decode together.

    python benchmarks/rows.py
    python benchmarks/rows.py --rows 256 1024 --against ../before

A FakeRunner computes the steps, so no kernel hides the cost of a row in Python. All sequences decode greedily without a
grammar, each after its own short prompt. The script prints the CPU time of the stepping thread in microseconds per
token, as the median of the rounds: step, and its parts. plan and commit belong to the scheduler, execute and sample to
the runner; core is the rest of a step of EngineCore. pack, which is not part of step, encodes the message with the
tokens.

--against: a checkout of another commit, measured in turn with this one, each in a separate process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("step", "plan", "execute", "sample", "commit", "core", "pack")
PROMPT = 16  # tokens
WARM, STEPS = 4, 32  # unmeasured and measured steps of an engine
LEAST = 2048  # tokens of a round: with few rows, several engines run one after the other

Times = dict[str, float]


def timed(times: Times, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def timing(*args: Any) -> Any:
        begun = time.thread_time()
        try:
            return call(*args)
        finally:
            times[name] = times.get(name, 0.0) + time.thread_time() - begun

    return timing


def engine(rows: int, tokens: int) -> Any:
    """An EngineCore over a FakeRunner, with `rows` requests for `tokens` tokens each."""
    from kvasir.engine.core import EngineCore
    from kvasir.runner.fake import FakeRunner
    from kvasir.sched.scheduler import Scheduler
    from kvasir.types import Request, SamplingParams

    length = PROMPT + tokens
    runner = FakeRunner(
        vocab_size=50_000,
        num_blocks=rows * -(-length // 16) + 1,
        max_rows=rows,
        max_tokens_per_step=rows * PROMPT,  # one step computes all prompts
        max_model_len=length,
    )
    core = EngineCore(runner, Scheduler(runner.capacity, max_waiting=rows))
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=tokens)
    for i in range(rows):
        core.add(Request(str(i), tuple(i * PROMPT + j for j in range(PROMPT)), params))
    return core


def measure(rows: int) -> Times:
    """Microseconds per token of each part."""
    times: Times = {}
    engines = -(-LEAST // (rows * STEPS))
    for _ in range(engines):
        decode(engine(rows, 1 + WARM + STEPS + 1), rows, times)
    times["core"] = times["step"] - sum(times[name] for name in ("plan", "execute", "sample", "commit"))
    return {name: times[name] / (engines * STEPS * rows) * 1e6 for name in PARTS}


def decode(core: Any, rows: int, times: Times) -> None:
    """Adds the seconds of STEPS steps, in which all rows decode, to times."""
    from kvasir.engine.wire import Deltas, encode

    for _ in range(1 + WARM):
        core.step()
    for owner, names in ((core.scheduler, ("plan", "commit")), (core.runner, ("execute", "sample"))):
        for name in names:
            setattr(owner, name, timed(times, name, getattr(owner, name)))
    step = timed(times, "step", getattr(core, "advance", core.step))
    pack = timed(times, "pack", lambda added: encode(getattr(Deltas, "of", Deltas)(added)))
    for _ in range(STEPS):
        added = step()
        assert count(added) == rows, "a row did not decode"
        pack(added)


def count(added: list[Any]) -> int:
    """The number of tokens in the deltas of a step."""
    return sum(len(part.token_ids) if hasattr(part, "token_ids") else len(part.ids) for part in added)


def measured_in(checkout: Path, rows: list[int]) -> dict[int, Times]:
    """The times of `measure` by rows, from a separate process that uses the package of a checkout."""
    command = [sys.executable, __file__, "--rows", *map(str, rows), "--child"]
    env = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    output = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE).stdout
    return {int(count): times for count, times in json.loads(output).items()}


def use(source: str) -> None:
    """Imports the package from `source`: without this, an editable install takes precedence over PYTHONPATH."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
    import kvasir

    assert kvasir.__file__ and Path(kvasir.__file__).is_relative_to(source), (
        f"the wrong package is measured: {kvasir.__file__}"
    )


def median(rounds: list[dict[int, Times]], rows: int, part: str) -> float:
    return statistics.median(times[rows][part] for times in rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path, help="a checkout of another commit")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        use(os.environ["PYTHONPATH"])
        print(json.dumps({rows: measure(rows) for rows in args.rows}))
        return
    checkouts = {"this": ROOT, **({"other": args.against.resolve()} if args.against else {})}
    rounds: dict[str, list[dict[int, Times]]] = {name: [] for name in checkouts}
    for i in range(args.rounds):
        for name in list(checkouts)[:: -1 if i % 2 else 1]:
            rounds[name].append(measured_in(checkouts[name], args.rows))
    print(f"{'rows':>6} {'':6}" + "".join(f"{part:>9}" for part in PARTS) + "   µs of CPU per token")
    for rows in args.rows:
        for name, done in rounds.items():
            print(f"{rows:6} {name:6}" + "".join(f"{median(done, rows, part):9.2f}" for part in PARTS))
        if args.against:
            ratios = [t[rows]["step"] / o[rows]["step"] for t, o in zip(rounds["this"], rounds["other"], strict=True)]
            low, high = min(ratios), max(ratios)
            print(f"{'':6} this / other: {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
