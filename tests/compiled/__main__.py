"""Compiles every launch of the sets (sets.py) for every target, checks the binaries, and writes a table.

python -m tests.compiled                     all; writes docs/gpu-kernels.md
python -m tests.compiled --targets sm_90 --sets models formats --kernels product gated
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from unittest.mock import patch

import triton

from kvasir.ops.linear.triton_matrix import LAYOUTS
from tests.compiled.compiling import PRODUCTS, SHARED, TARGETS, Case, Compiled, Measures, Wanted, cases_of, measured
from tests.compiled.page import PAGE, constants_of, page
from tests.compiled.sets import SETS, launches_in

OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
TENSOR_COLUMNS = 512  # of sm_100's tensor memory
WITH_PDL = ("sm_90", "sm_100")
WIDE = (*PRODUCTS, "attend", "join_norm")


def all_cases(sets: Iterable[str], target: str) -> list[Wanted]:
    """The distinct cases of sets of launches on a target."""
    hip = "6" if target.startswith("gfx") else None
    has_pdl = patch("kvasir.ops.launch.has_pdl", lambda: target in WITH_PDL)
    has_tensor_memory = patch("kvasir.ops.attention.triton.has_tensor_memory", lambda: target == "sm_100")
    with patch("torch.version.hip", hip), has_pdl, has_tensor_memory:
        return cases_of(launch for name in sets for launch in launches_in(name))


def faults(found: Sequence[Compiled]) -> list[str]:
    """What is wrong with compiled kernels."""
    wrong: list[str] = []
    orders: dict[tuple, dict[tuple, str]] = defaultdict(dict)
    for c in found:
        title, got, constants = _title(c), c.found, dict(c.case.constants)
        wrong += [f"{title}: spills {got.spills}"] * (got.spills > most_spills(c.case))
        wrong += [f"{title}: {got.shared} bytes of shared memory"] * (got.shared > SHARED[c.target])
        wrong += [f"{title}: {got.columns} columns of tensor memory"] * (got.columns > TENSOR_COLUMNS)
        if got.waits != bool(constants.get("PDL")):
            wrong.append(f"{title}: " + ("waits for another kernel" if got.waits else "reads before it waits"))
        wrong += [f"{title}: no wide loads"] * (c.case.name in WIDE and not got.wide)
        if c.case.name in (*PRODUCTS, "attend"):
            wrong += _wrong_instruction(c, title)
        for sums in c.sums:
            # Rows of weights that a warp multiplies at a time.
            warps = constants.get("BLOCK_N", 0) // dict(c.case.options).get("num_warps", 4)
            key = got.mma, constants.get("BLOCK_K"), warps, got.order
            orders[c.target, sums].setdefault(key, title)
    for (target, sums), seen in orders.items():
        if len(seen) > 1:
            each = "\n".join(f"    {title}: {key}" for key, title in seen.items())
            wrong.append(f"{sums} on {target}: the order of sums differs:\n{each}")
    return wrong


def most_spills(case: Case) -> float:
    """None, but for quantized weights with inputs in float32, a mode for comparisons, and for older versions of Triton,
    whose assembler spills a few registers of the largest tiles."""
    constants = dict(case.constants)
    if str(constants.get("DTYPE")) == "fp32" and constants.get("FORMAT") in LAYOUTS:
        return math.inf
    return 256 if OLD else 0


def _wrong_instruction(c: Compiled, title: str) -> list[str]:
    """Products of 16-bit numbers take matrix instructions; those of float32 must not: on NVIDIA's GPUs they round."""
    wide = "fp32" in (str(dict(c.case.constants).get("DTYPE")), dict(c.case.signature).get("q", "").strip("*"))
    if wide and OLD and c.target == "sm_100" and dict(c.case.constants).get("FORMAT") in LAYOUTS:
        return []  # kvasir.device.rounds_float32 refuses such models
    if wide and c.target.startswith("sm_"):
        return [f"{title}: matrix instruction {c.found.mma} for float32"] * bool(c.found.mma)
    return [f"{title}: no matrix instruction"] * (not c.found.mma)


def _title(c: Compiled) -> str:
    return f"{c.case.name} on {c.target} ({constants_of(c.case)})"


def _compile(work: tuple[int, str]) -> Measures | str:
    case = _cases[work[0]].case
    try:
        return measured(case, work[1])
    except Exception as error:  # a compiler's own errors have no common class
        return f"{case.name} on {work[1]} ({constants_of(case)}): {type(error).__name__}: {error}"[:2000]


_cases: list[Wanted] = []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=list(SETS))
    parser.add_argument("--kernels", nargs="*", default=[], help="only these")
    parser.add_argument("--check", action="store_true", help="write no table")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    work: list[tuple[int, str]] = []
    for target in args.targets:
        for wanted in all_cases(args.sets, target):
            if not args.kernels or wanted.case.name in args.kernels:
                work.append((len(_cases), target))
                _cases.append(wanted)
    found: list[Compiled] = []
    wrong: list[str] = []
    begun = time.perf_counter()
    with ProcessPoolExecutor(args.jobs) as pool:  # forked: the workers have the cases
        for done, ((i, target), result) in enumerate(zip(work, pool.map(_compile, work), strict=True), 1):
            if isinstance(result, str):
                wrong.append(result)
            else:
                found.append(Compiled(_cases[i].case, target, result, _cases[i].sums))
            if done % 50 == 0 or done == len(work):
                took = time.perf_counter() - begun
                print(f"{done} of {len(work)} compiled in {took:.0f} s", file=sys.stderr, flush=True)
    wrong += faults(found)
    wrong += [] if found else ["nothing was compiled"]
    print("\n".join(wrong) or f"{len(found)} compilations: no spills, wide loads, one order of each matrix's sums")
    everything = set(args.targets) == set(TARGETS) and set(args.sets) == set(SETS) and not args.kernels
    if everything and not (wrong or args.check):
        PAGE.write_text(page(found))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
