#!/usr/bin/env python3
"""Prints the files of the package whose functions run in one decode step.

Builds an engine core without drafters, runs a few greedy requests until all of them decode, and traces the next step
with sys.setprofile: every function of the package that is called, in the order of its first call. Native kernels are
not traced; docs/architecture.md names their files.

    python scripts/trace_step.py [model] [--executor program|eager] [--rows 8] [--functions]
"""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from kvasir.config import EngineOptions
from kvasir.engine.build import build_core
from kvasir.engine.core import EngineCore
from kvasir.types import Request, SamplingParams

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "kvasir"
STEADY = 6  # steps after which all requests decode


def decoding(model: str, executor: str, rows: int) -> EngineCore:
    """A core in which all requests decode."""
    options = EngineOptions(model, executor=executor, threads=1, num_blocks=64, max_model_len=256, speculate="off")
    core = build_core(options)
    for i in range(rows):
        params = SamplingParams(temperature=0.0, max_tokens=40, seed=i, ignore_eos=True)
        core.add(Request(f"r{i}", (1, 2, 3 + i), params))
    for _ in range(STEADY):
        core.advance()
    return core


def followed(core: EngineCore) -> dict[str, list[str]]:
    """Functions by file, both in the order of their first call in one step."""
    seen: dict[str, list[str]] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            functions = seen.setdefault(path.relative_to(PACKAGE).as_posix(), [])
            if frame.f_code.co_qualname not in functions:
                functions.append(frame.f_code.co_qualname)

    threading.setprofile_all_threads(note) if sys.version_info >= (3, 12) else threading.setprofile(note)
    sys.setprofile(note)
    try:
        core.advance()
    finally:
        sys.setprofile(None)
        threading.setprofile_all_threads(None) if sys.version_info >= (3, 12) else threading.setprofile(None)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="kvasir-mini")
    parser.add_argument("--executor", default="program")
    parser.add_argument("--rows", type=int, default=3, help="number of decoding sequences (8 or more: columns)")
    parser.add_argument("--functions", action="store_true", help="also print the names of the functions")
    options = parser.parse_args()
    core = decoding(options.model, options.executor, options.rows)
    seen = followed(core)
    core.close()
    for path, functions in seen.items():
        print(f"{path:<32} {len(functions):>3}" + (f"  {', '.join(functions)}" if options.functions else ""))
    print(f"{len(seen)} files, {sum(map(len, seen.values()))} functions in one decode step ({options.executor})")


if __name__ == "__main__":
    main()
