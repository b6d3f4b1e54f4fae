"""Times of the graph executor on one GPU, with random weights made there.

    python -m benchmarks.gpu                  quick: about 7 minutes, the rest in a second run
    python -m benchmarks.gpu --full
    python -m benchmarks.gpu --device cpu --shapes tiny --out /tmp       a trial without a GPU, in Triton's interpreter

Each cell is written to OUT/gpu-<device>.json when it is measured, and not measured again with the same code.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="more batches, contexts and tiles")
    parser.add_argument("--shapes", nargs="*", default=["0.6B", "8B"])
    parser.add_argument("--formats", nargs="*", default=["BF16", "Q4_K", "F8_BLOCK"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--minutes", type=float, default=7.0, help="no cell starts later")
    args = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1" if args.device == "cpu" else "0"  # before Triton is imported

    import torch

    from benchmarks.gpu.measure import Place
    from benchmarks.gpu.run import Run, check, quiet

    check(args.shapes)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: torch sees none, so nothing was measured")
        return 0
    name = torch.cuda.get_device_name(0) if args.device == "cuda" else "interpreter"
    path = args.out / f"gpu-{re.sub(r'[^a-z0-9]+', '-', name.lower())}.json"
    run = Run(Place(args.device), args.shapes, args.formats, path, full=args.full, minutes=args.minutes)
    with quiet():
        left = run.measure()
    print(run.table())
    print(f"{len(run.cells)} cells in {path}")
    if left:
        print(f"{len(left)} cells are left for another run: {', '.join(left)}")
    return int(any("error" in cell for cell in run.cells.values()))


if __name__ == "__main__":
    sys.exit(main())
