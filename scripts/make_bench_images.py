#!/usr/bin/env python3
"""Draws the plots of `kvasir bench` in docs/performance.md from real runs: the shape of Qwen3 0.6B, random weights.

    python scripts/make_bench_images.py                     measures, and writes docs/images/bench-*.svg
    python scripts/make_bench_images.py --results /tmp/x    keeps the measurements there, or draws those that are there

Random weights take as long as trained ones. Takes two minutes on a quiet machine with two cores, and 2 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.shapes import SHAPES, write  # noqa: E402
from kvasir.cli import bench  # noqa: E402
from kvasir.cli.bench.plots import plot  # noqa: E402
from kvasir.cli.bench.report import of_dict  # noqa: E402
from kvasir.config import EngineOptions  # noqa: E402

FOLDER = ROOT / "docs" / "images"
SHAPE = "qwen3-0.6b"
TITLE = "Qwen3 0.6B, Q8_0, 128 prompt and 32 output tokens"
# mode -> requests, requests per second, runs
RUNS = {"load": (32, 0.0, 3), "serve": (48, 1.5, 1)}
# picture -> mode, panel
PICTURES = {"load": ("load", "load"), "limit": ("load", "limit"), "latency": ("serve", "latency")}
# Opaque in both themes, so that it can be read on any page: dark if the reader's system is.
DARK = "<style>@media (prefers-color-scheme: dark) { svg { filter: invert(0.88) hue-rotate(180deg) } }</style>"


def measure(mode: str, model: Path, results: Path) -> None:
    requests, rate, repeats = RUNS[mode]
    options = EngineOptions(str(model), served_model_name=SHAPE, quantize="q8", max_model_len=1024)
    bench.run(options, mode, 128, 32, requests, rate, repeats, results)


def result_of(mode: str, results: Path) -> dict[str, Any] | None:
    found = sorted(results.glob(f"{SHAPE}-{mode}-*.json"))
    return json.loads(found[-1].read_text("utf-8")) if found else None


def draw(name: str, result: dict[str, Any]) -> None:
    path = FOLDER / f"bench-{name}.svg"
    rate = f", {RUNS['serve'][1]:g} requests a second" if result["mode"] == "serve" else ""
    plot(path, TITLE + rate, *of_dict(result), panels=(PICTURES[name][1],))
    text = re.sub(r"(<svg [^>]*>)", rf"\1\n {DARK}", path.read_text("utf-8"), count=1)
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")
    print(f"wrote {path}, {path.stat().st_size / 1000:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    matplotlib.rcParams |= {"svg.hashsalt": "kvasir"}  # the same ids each time
    with tempfile.TemporaryDirectory() as temporary:
        results = args.results or Path(temporary) / "results"
        if missing := [mode for mode in RUNS if result_of(mode, results) is None]:
            write(SHAPES[SHAPE], model := Path(temporary) / SHAPE)
            for mode in missing:
                measure(mode, model, results)
        for name, (mode, _) in PICTURES.items():
            draw(name, result_of(mode, results) or {})


if __name__ == "__main__":
    main()
