"""Measures models in the standard cases and writes one JSON and one plot for each.

    python benchmarks/run.py                             the bundled model, into benchmarks/results
    python benchmarks/run.py --model /tmp/qwen3-0.6b     another model, real or made by benchmarks/shapes.py
    python benchmarks/run.py --case decode --repeats 9

Each case runs in a separate process, so that no case profits from another's warm-up.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
CASES = {
    "decode": "--mode latency --input-len 128 --output-len 128",
    "prefill": "--mode latency --input-len 512 --output-len 2",
    "batch-4": "--mode throughput --num-prompts 4 --input-len 128 --output-len 128",
    "batch-8": "--mode throughput --num-prompts 8 --input-len 128 --output-len 128",
    "batch-32": "--mode throughput --num-prompts 32 --input-len 128 --output-len 128",
    "serve": "--mode serve --num-prompts 32 --input-len 128 --output-len 64 --request-rate 2",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", action="append", help="folder, file or name; repeatable")
    parser.add_argument("--case", action="append", choices=CASES, help="default: all cases; repeatable")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args, more = parser.parse_known_args()  # other options are passed to `kvasir bench`
    failed = 0
    for model in args.model or ["kvasir-mini"]:
        for case in args.case or CASES:
            folder = args.out / case
            command = [sys.executable, "-m", "kvasir.cli", "bench", model, *CASES[case].split(), *more]
            command += ["--repeats", str(args.repeats), "--out", str(folder)]
            print(f"== {model}, {case}", flush=True)
            failed += subprocess.run(command).returncode != 0
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
