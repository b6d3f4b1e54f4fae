"""llvm-mca's estimate of the tiles of products with integer formats, for processors that are not at hand.

    python -m benchmarks.estimates --llvm-mca /usr/lib/llvm-16/bin/llvm-mca
    python -m benchmarks.estimates --isa avx2 --cpu znver3 --library ../before/src/kvasir/_lib/libkvasir_cpu.so

It disassembles the library with objdump, finds the loops over the blocks of a matrix and over the chunks of a block,
and lets llvm-mca simulate their instructions. The share is the time of their byte products alone over the time of the
loops, in percent. In this model all memory is as fast as the first cache, and what is outside the loops takes no time;
where it is wrong about an instruction, so is the estimate. Rows take the largest tiles, and where these read slabs, the
unpacking counts once for all rows. Debian's packages of llvm-mca from 16 on know znver4.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvasir.ops import native as door
from kvasir.ops.linear.native import FORMATS

SHOWN = ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
ROWS = {"avx512": (1, 2, 4, 6, 8, 12, 24, 36), "avx2": (1, 2, 3, 4, 8, 12, 16, 32)}
BYTES = {"avx512": "vpdpbusd", "avx2": "vpmaddubsw"}
PER_ROW = {"avx512": 1, "avx2": 2}  # such instructions for four columns of a panel and a row
ITERATIONS = 100
Code = list[tuple[int, str]]  # addresses and instructions


@dataclass(frozen=True)
class Kernel:
    """A function of a format: a tile (rows > 0), with or without slabs, or their unpacking."""

    rows: int
    panels: int
    slab: bool


def functions(library: Path, isa: str) -> Iterator[tuple[str, Code]]:
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(library)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for part in text.split("\n\n"):
        title, _, lines = part.strip().partition("\n")
        name = re.search(rf"{isa}::\(anonymous namespace\)::(\w+<[^(]*>)\(", title)
        if name:
            found = (line.strip().split(":\t", 1) for line in lines.splitlines() if ":\t" in line)
            yield name[1], [(int(at, 16), text.partition("#")[0].strip()) for at, text in found]


def kernels(library: Path, isa: str) -> dict[int, dict[Kernel, Code]]:
    """By format."""
    found: dict[int, dict[Kernel, Code]] = {}
    for name, code in functions(library, isa):
        kind, _, rest = name.partition("<")
        numbers = [int(number) for number in re.findall(r"\d+", rest)]
        if kind == "add_tile" and len(numbers) == 3:
            kernel = Kernel(numbers[1], numbers[2], False)
        elif kind == "add_slab":
            kernel = Kernel(numbers[1], 1, True)
        elif kind == "unpack_blocks":
            kernel = Kernel(0, 1, True)
        else:
            continue
        found.setdefault(numbers[0], {})[kernel] = code
    return found


class Model:
    """A processor of llvm-mca."""

    def __init__(self, program: str, cpu: str):
        self._command = [program, f"-mcpu={cpu}", f"-iterations={ITERATIONS}"]

    def cycles(self, instructions: list[str]) -> float:
        """Of one iteration. Branches are left out: they are predicted."""
        kept = [re.sub(r"<.*>", "", text) for text in instructions if not re.match(r"(j|call|ret|nop|cs nop)", text)]
        run = subprocess.run(self._command, input="\n".join(kept) + "\n", capture_output=True, text=True)
        found = re.search(r"Total Cycles:\s+(\d+)", run.stdout)
        if not found:
            raise SystemExit(f"llvm-mca failed: {run.stderr[:500]}")
        return int(found[1]) / ITERATIONS

    def alone(self, isa: str) -> float:
        """Cycles of a byte product that waits for nothing."""
        wide = "zmm" if isa == "avx512" else "ymm"
        return self.cycles([f"{BYTES[isa]} %{wide}0, %{wide}1, %{wide}{2 + i}" for i in range(12)]) / 12


def loops(code: Code) -> list[tuple[int, int]]:
    """First and last instruction, the shortest of each first one, in ascending length."""
    places = {at: i for i, (at, _) in enumerate(code)}
    shortest: dict[int, int] = {}
    for i, (_, text) in enumerate(code):
        jump = re.match(r"j\w+\s+([0-9a-f]+)", text)
        first = places.get(int(jump[1], 16)) if jump else None
        if first is not None and first <= i:
            shortest[first] = min(shortest.get(first, i), i)
    return sorted(shortest.items(), key=lambda loop: loop[1] - loop[0])


def cycles_of_block(model: Model, code: Code, operation: str, expected: int) -> float | None:
    """Of a loop with `expected` such operations each time, in an inner loop or not. None if there is no such loop."""
    texts = [text for _, text in code]

    def count(first: int, last: int) -> int:
        return sum(text.startswith(operation) for text in texts[first : last + 1])

    inner = next((loop for loop in loops(code) if count(*loop) and expected % count(*loop) == 0), None)
    if inner is None:
        return None
    turns = expected // count(*inner)
    cycles = model.cycles(texts[inner[0] : inner[1] + 1])
    if turns == 1:
        return cycles
    outer = next((loop for loop in loops(code) if loop[0] < inner[0] and inner[1] < loop[1]), None)
    return None if outer is None else model.cycles(texts[outer[0] : outer[1] + 1]) + (turns - 1) * cycles


def share(model: Model, isa: str, found: dict[Kernel, Code], cols: int, rows: int, panels: int) -> float | None:
    """The share of the peak for some rows, by the largest tiles, with slabs or up to so many panels where there are any
    for as many rows."""
    slabs = {kernel.rows: kernel for kernel in found if kernel.slab and kernel.rows}
    singles = {kernel.rows: kernel for kernel in found if not kernel.slab and kernel.panels == 1}
    pairs = {kernel.rows: kernel for kernel in found if kernel.panels == 2}
    in_pairs = panels == 2 and rows >= (3 if 3 in pairs else 9)
    tiles = pairs if in_pairs else slabs if rows > max(singles) and slabs else singles
    count = -(-rows // max(tiles))
    if rows % count or rows // count not in tiles:
        return None
    tile = tiles[rows // count]
    operations = cols // 4 * tile.rows * tile.panels * PER_ROW[isa]
    cycles = cycles_of_block(model, found[tile], BYTES[isa], operations)
    if cycles is None:
        return None
    total = count * cycles
    if tile.slab:
        stores = cols // 4 * PER_ROW[isa]
        unpacking = cycles_of_block(model, found[Kernel(0, 1, True)], "vmovdq", stores)
        total += unpacking or 0.0
    return count * operations * model.alone(isa) / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=SHOWN, choices=FORMATS, metavar="FORMAT")
    parser.add_argument("--cpu", nargs="+", default=("znver4", "sapphirerapids"), help="as llvm-mca names them")
    parser.add_argument("--isa", choices=tuple(BYTES), default="avx512")
    parser.add_argument("--library", type=Path, default=door.PATH)
    parser.add_argument("--llvm-mca", default="llvm-mca", help="the program")
    args = parser.parse_args()
    found = kernels(args.library, args.isa)
    print(f"{'':15} {'':8}" + "".join(f"{rows:6}" for rows in ROWS[args.isa]) + "   rows: percent of the peak")
    for cpu in args.cpu:
        model = Model(args.llvm_mca, cpu)
        panels = 2 if args.isa == "avx512" and cpu.startswith("znver") else 1  # as csrc/dispatch.cpp chooses
        for name in args.formats:
            place = FORMATS.index(name)
            cols = 256 if place >= FORMATS.index("Q2_K") else 64
            shares = [share(model, args.isa, found[place], cols, rows, panels) for rows in ROWS[args.isa]]
            cells = "".join(f"{'-':>6}" if value is None else f"{100 * value:6.0f}" for value in shares)
            print(f"{cpu:15} {name:8}{cells}", flush=True)


if __name__ == "__main__":
    main()
