"""Compares Kvasir with the other engines, measured in turn, and writes one JSON and one plot.

    python -m benchmarks.peers.run                         every row, at least five rounds each
    python -m benchmarks.peers.run --only Q4_K_M --rounds 7
    python -m benchmarks.peers.run --list                  the rows, with their bars and aims

`make peers` installs the engines and makes the models. Engines that are not installed are skipped with a message.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers import environments
from benchmarks.peers.crew import Crew
from benchmarks.peers.engines import MISSING, Setup
from benchmarks.peers.measure import compare
from benchmarks.peers.places import PEERS, RESULTS, PeerError
from benchmarks.peers.probe import METHODS, rates
from benchmarks.peers.report import plot, print_rows, write
from benchmarks.peers.rows import HTTP_ROW, HTTP_ROW_VLLM, LLAMA_SERVER, ROWS, Row
from kvasir.cli.machine import machine_facts, software_facts
from kvasir.errors import KvasirError


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no worker keeps running
    args = _arguments()
    folder = args.dir.resolve()
    threads = args.threads or machine_facts()["cores"]
    setup = Setup(folder, (args.llama_bin or environments.llama_bin(folder)).resolve(), threads, folder / "logs")
    http = HTTP_ROW_VLLM if MISSING[LLAMA_SERVER](setup) else HTTP_ROW
    rows = [row for row in (*ROWS, http) if not args.only or any(word in row.name for word in args.only)]
    if args.list:
        for row in rows:
            print(f"{row.name:34} bar {row.bar:g}, aim {row.aim:g}, against {', '.join(row.peers) or 'itself'}")
        return 0
    result = facts(setup, args.rounds)
    path = args.out / time.strftime("peers-%Y%m%d-%H%M%S.json")
    failed = _measure(rows, setup, args.rounds, result, path)
    if not result["rows"]:
        return 1
    print_rows(result["rows"])
    print(f"wrote {path}")
    try:
        plot(path.with_suffix(".png"), result["rows"])
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
    return min(failed, 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", help="only rows whose name contains this text; repeatable")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="default: the number of physical cores")
    parser.add_argument("--dir", type=Path, default=PEERS, help="folder of the engines and models")
    parser.add_argument("--llama-bin", type=Path, help="folder of llama-server and llama-batched-bench")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--list", action="store_true", help="only list the rows")
    return parser.parse_args()


def _measure(rows: Sequence[Row], setup: Setup, rounds: int, result: dict[str, Any], path: Path) -> int:
    """Fills in result["rows"] and result["skipped"], and writes them after each row. Returns the number of skips."""
    crew = Crew(setup)
    try:
        for row in rows:
            print(f"== {row.name}", flush=True)
            try:
                result["rows"].append(compare(row, crew, rows, rounds))
            except (PeerError, KvasirError) as error:
                print(f"  skipped: {error}", flush=True)
                result["skipped"].append({**asdict(row), "reason": str(error)})
            write(path, result)
    finally:
        crew.close()
    return len(result["skipped"])


def facts(setup: Setup, rounds: int) -> dict[str, Any]:
    """What a file of results says before its rows."""
    gave = rates(setup.threads)
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": machine_facts(),
        "software": software_facts(),
        "threads": setup.threads,
        "rounds": rounds,
        "probe": {**asdict(gave), "how": METHODS[gave.method]},
        "built": {"llama-cpp-python": environments.LLAMA, "llama.cpp flags": environments.LLAMA_FLAGS},
        "rows": [],
        "skipped": [],
    }


if __name__ == "__main__":
    sys.exit(main())
