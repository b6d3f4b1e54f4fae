"""Compares model families with llama.cpp on the same GGUF files, measured in turn, into one JSON and one plot.

    python -m benchmarks.peers.families                    every row, five rounds each
    python -m benchmarks.peers.families --only gemma --rounds 7
    python -m benchmarks.peers.families --list             the rows, with their bars
    python -m benchmarks.peers.families --check            makes the files and compares both engines' answers, no times

Each row is written when it is done; the same command continues after an interruption. Files have real shapes and random
weights (family_shapes.py); missing ones are made first. Before the rows of a model both engines' answers are
compared: the probabilities of the next token after a few prompts, or embeddings; the file says whether they agree.

A row meets its bar by its ratio to llama.cpp, or by 85 % of the machine's measured limit.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import environments
from benchmarks.peers.crew import Crew
from benchmarks.peers.engines import Setup
from benchmarks.peers.family_shapes import SHAPES, Shape
from benchmarks.peers.limits import work_of
from benchmarks.peers.measure import compare
from benchmarks.peers.models import make_family, model_gguf
from benchmarks.peers.places import PEERS, RESULTS, PeerError
from benchmarks.peers.report import plot, print_rows, write
from benchmarks.peers.rows import LLAMA, OURS, Row
from benchmarks.peers.run import facts
from kvasir.cli.machine import machine_facts
from kvasir.errors import KvasirError
from kvasir.json_file import read_json_object

OF_LIMIT = 0.85
NEAR = 1.0  # largest difference of a log-probability: both engines round activations, and weights are random
ALIKE = 0.98  # smallest cosine of embeddings
_PROMPTS, _LENGTH, _BEST = 3, 40, 5


def rows_of(shape: Shape) -> list[Row]:
    """The rows of a model, with the bars of the plan for model coverage."""
    name, kind = shape.name, shape.kind
    if shape.embeds:
        return [Row(f"{name} {kind} embed 32", name, kind, "embed", 32, 128, 1, (LLAMA,), 2.0, 2.5)]
    return [
        Row(f"{name} {kind} decode 1", name, kind, "decode", 1, 128, 64, (LLAMA,), 1.3, 1.6),
        Row(f"{name} {kind} decode 8", name, kind, "decode", 8, 128, 48, (LLAMA,), 2.5, 3.5),
        Row(f"{name} {kind} prefill 512", name, kind, "prefill", 1, 512, 2, (LLAMA,), 2.0, 2.5),
    ]


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no worker keeps running
    args = _arguments()
    rows = [row for shape in SHAPES.values() for row in rows_of(shape)]
    rows = [row for row in rows if not args.only or any(word in row.name for word in args.only)]
    if args.list:
        for row in rows:
            print(f"{row.name:34} bar {row.bar:g}, or {OF_LIMIT:.0%} of the limit")
        return 0
    folder = args.dir.resolve()
    setup = Setup(folder, environments.llama_bin(folder), args.threads or machine_facts()["cores"], folder / "logs")
    result = continued(args.out, lambda: facts(setup, args.rounds), [row.name for row in rows] if args.again else ())
    failed = _measure(rows, setup, args, result)
    if result["rows"] and not args.check:
        print_rows(result["rows"])
        try:
            plot(args.out.with_suffix(".png"), result["rows"])
        except ImportError:
            print("no plot: matplotlib is not installed", file=sys.stderr)
    print(f"wrote {args.out}")
    return min(failed, 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", help="only rows whose name contains this text; repeatable")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, help="new tokens of decoding, to try the program; default: the row's")
    parser.add_argument("--again", action="store_true", help="measure rows again that the file already has")
    parser.add_argument("--check", action="store_true", help="only compare the engines' answers")
    parser.add_argument("--threads", type=int, help="default: the number of physical cores")
    parser.add_argument("--dir", type=Path, default=PEERS, help="folder of llama.cpp and the models")
    parser.add_argument("--out", type=Path, default=RESULTS / time.strftime("families-%Y-%m-%d.json"))
    parser.add_argument("--list", action="store_true", help="only list the rows")
    return parser.parse_args()


def continued(path: Path, begin: Any, again: Sequence[str]) -> dict[str, Any]:
    """The results so far without the rows named in `again`; without a file, those that `begin` returns."""
    if not path.exists():
        return {**begin(), "agreement": {}}
    found = read_json_object(path)
    found["rows"] = [row for row in found["rows"] if row["name"] not in again]
    return found


def _measure(rows: Sequence[Row], setup: Setup, args: argparse.Namespace, result: dict[str, Any]) -> int:
    """Fills in `result` and writes it after each row. Returns the number of rows that could not be measured."""
    crew, failed = Crew(setup), 0
    result["skipped"] = []
    try:
        for row in rows:
            if any(done["name"] == row.name for done in result["rows"]):
                continue
            print(f"== {row.name}", flush=True)
            try:
                make_family(setup.folder, SHAPES[row.model])
                if row.model not in result["agreement"]:
                    result["agreement"][row.model] = agreement(row, crew, rows)
                if not args.check:
                    row = replace(row, new=args.new) if args.new and row.figure == "decode" else row
                    result["rows"].append(judged(compare(row, crew, rows, args.rounds)))
            except (PeerError, KvasirError) as error:
                print(f"  skipped: {error}", flush=True)
                result["skipped"].append({**asdict(row), "reason": str(error)})
                failed += 1
            write(args.out, result)
    finally:
        crew.close()
    return failed


def judged(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its share of the limit, which may meet the bar too."""
    ours = row["values"][OURS]["median"]
    share = ours / row["limit"] if row["limit"] else None
    met = bool(row["meets_bar"]) or (share is not None and share >= OF_LIMIT)
    return {**row, "of_limit": share, "meets_bar": met if row["value"] is not None or share is not None else None}


# --- agreement ------------------------------------------------------------------------------------------


def agreement(row: Row, crew: Crew, rows: Sequence[Row]) -> dict[str, Any]:
    """How far the engines' answers lie apart, and whether they agree. Raises PeerError if llama.cpp is unavailable."""
    random = np.random.default_rng(7)
    size = work_of(model_gguf(crew.setup.folder, row.model, row.kind))[1].vocab_size
    prompts = random.integers(0, size, (_PROMPTS, _LENGTH)).tolist()
    count = 0 if row.figure == "embed" else _BEST
    answers = {
        name: [crew.get(name, row, rows).worker.ask("best", prompt=ids, count=count) for ids in prompts]
        for name in (OURS, LLAMA)
    }
    pairs = list(zip(answers[OURS], answers[LLAMA], strict=True))
    if count:
        apart = max(apart_by(ours["logprobs"], theirs["logprobs"]) for ours, theirs in pairs)
        found, agree = {"logprob_difference": apart}, apart < NEAR
    else:
        alike = min(cosine(ours["embedding"], theirs["embedding"]) for ours, theirs in pairs)
        found, agree = {"cosine": alike}, alike > ALIKE
    if not agree:  # in a deep random network rounding alone can do that, so the rows are measured all the same
        print(f"  llama.cpp and Kvasir do not agree about {row.model}: {found}", flush=True)
    return {**found, "agree": agree}


def apart_by(ours: Mapping[str, float], theirs: Mapping[str, float]) -> float:
    """The largest difference among the tokens that both consider likely; infinity if there are none."""
    both = ours.keys() & theirs.keys()
    return max((abs(ours[token] - theirs[token]) for token in both), default=math.inf)


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    return float(np.dot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b)))


if __name__ == "__main__":
    sys.exit(main())
