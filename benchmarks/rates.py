"""The rate of products with integer formats, as a share of the processor's peak, by format and number of rows.

    python -m benchmarks.rates
    python -m benchmarks.rates --formats Q4_K Q6_K --rows 2 8 32 --against ../before/src/kvasir/_lib/libkvasir_cpu.so

The peak is that of the instruction which multiplies bytes, vpdpbusd with AVX-512, else vpmaddubsw, in a loop without
loads. The system's C compiler compiles it, and it is timed in turn with the kernel. A rate counts multiply-adds of
levels with activations: scales, minima and segments are overhead, and so are with AVX2 the additions of products, which
vpdpbusd does itself. The second line has the rate of a loop that only loads activations, multiplies and adds.

All run on one thread, and times are the thread's own. Rates are those of the fastest round, so that other programs
disturb them least. By default the matrix fits the second cache. --cold: matrices of 64 MB in total in turn, as a step
reads them. --against: another build of the library, measured in turn with this one in the same process; both must give
the same bits. The last line of a format has the medians of the rounds' ratios of this time to that of the other.
--panels: the panels of this build's tiles on AVX-512. The other build has its processor's, so a copy of this one shows
what they bring.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvasir.ops import native as door
from kvasir.ops.linear import native
from kvasir.ops.linear.packed import PackedMatrix, pack_rows
from kvasir.quant.gguf_types import GGMLType
from tests.ops.test_packed import raw_rows

FORMATS = ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "MXFP4")
COUNTS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
LEAST = 0.001  # seconds of a measurement
COLD = 1 << 26  # bytes
LOOP = 16  # instructions of the peak's loop, each with its own destination where it adds
LOOPS = r"""
#include <immintrin.h>
__attribute__((target("avx2"))) void peak_avx2(long count) {
    __m256i w = _mm256_set1_epi8(3), x = _mm256_set1_epi8(5), to;
    for (long i = 0; i < count; ++i)
        __asm__ volatile(".rept 16; vpmaddubsw %2, %1, %0; .endr" : "=x"(to) : "x"(w), "x"(x));
}
__attribute__((target("avx2"))) void dots_avx2(long count) {
    int x[8] = {0};
    for (long i = 0; i < count; ++i)
        __asm__ volatile(".irp to,0,2,4,6,0,2,4,6; vpbroadcastd %0, %%ymm8; vpmaddubsw %%ymm8, %%ymm9, %%ymm10;"
            "vpmaddubsw %%ymm8, %%ymm11, %%ymm12; vpaddw %%ymm10, %%ymm\\to, %%ymm\\to;"
            "vpaddw %%ymm12, %%ymm1, %%ymm1; .endr" :: "m"(x)
            : "xmm0", "xmm1", "xmm2", "xmm4", "xmm6", "xmm8", "xmm10", "xmm12");
}
__attribute__((target("avx512vnni"))) void peak_avx512(long count) {
    for (long i = 0; i < count; ++i)
        __asm__ volatile(".irp to,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15; vpdpbusd %%zmm17, %%zmm16, %%zmm\\to; .endr"
            ::: "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
            "xmm12", "xmm13", "xmm14", "xmm15");
}
void repeat(long count, void (*linear)(const void*, const void*, long, long, long, float*, long, const float*,
            const float*, long), const void** matrices, long num, const void* x, long rows, float* out, long columns) {
    for (long i = 0; i < count; ++i)
        linear(matrices[i % num], x, rows, 0, (columns + 15) / 16, out, columns, 0, 0, 0);
}
"""

Loop = Callable[[int], None]  # with the number of iterations


def compiled() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "loops.c", Path(folder) / "loops.so"
        source.write_text(LOOPS)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        loops = ctypes.CDLL(str(library))
    pointer, number = ctypes.c_void_p, ctypes.c_long
    for name in ("peak_avx2", "dots_avx2", "peak_avx512"):
        getattr(loops, name).restype, getattr(loops, name).argtypes = None, [number]
    loops.repeat.restype = None
    loops.repeat.argtypes = [number, pointer, pointer, number, pointer, number, pointer, number]
    return loops


def seconds(loop: Loop, count: int) -> float:
    """Of one iteration."""
    begun = time.thread_time()
    loop(count)
    return (time.thread_time() - begun) / count


def count_for(loop: Loop) -> int:
    """Iterations of a measurement of LEAST seconds."""
    loop(1)
    count = 1
    while (taken := seconds(loop, count) * count) < LEAST / 4:
        count *= 4
    return max(1, round(count * LEAST / taken))


class Products:
    """Products of some rows with matrices in turn, by one library."""

    def __init__(self, loops: ctypes.CDLL, path: Path, isa: str, matrices: list[PackedMatrix], x: np.ndarray):
        library = ctypes.CDLL(str(path))
        if library.kvasir_abi_version() != door.ABI_VERSION or library.kvasir_set_isa(door.ISAS.index(isa)) < 0:
            raise SystemExit(f"{path} has another ABI or cannot run {isa} here")
        self._repeat, self._linear = loops.repeat, ctypes.cast(library.kvasir_linear, ctypes.c_void_p)
        self._structs = (ctypes.c_void_p * len(matrices))(*(matrix.address for matrix in matrices))
        self._activated = native.prepare(matrices[0], x)
        self.out = np.zeros((len(x), matrices[0].rows), np.float32)

    def __call__(self, count: int) -> None:
        rows, columns = self.out.shape
        self._repeat(
            *(count, self._linear, self._structs, len(self._structs)),
            *(self._activated.ctypes.data, rows, self.out.ctypes.data, columns),
        )


def matrices_of(kind: str, rows: int, cols: int, segments: int, cold: bool) -> list[PackedMatrix]:
    raw = raw_rows(GGMLType[kind], rows, cols, 0)
    first = pack_rows(kind, raw, rows, cols, segments, threads=1)
    more = COLD // first.nbytes if cold else 0
    return [first, *(pack_rows(kind, raw, rows, cols, segments, threads=1) for _ in range(more))]


def rounds_of(products: list[Products], peak: Loop, rounds: int) -> tuple[list[list[float]], list[float]]:
    """Seconds of each of the products and of an iteration of the peak's loop, in each round."""
    loops, counts = count_for(peak), [count_for(product) for product in products]
    found: list[list[float]] = [[] for _ in products]
    best: list[float] = []
    for turn in range(rounds):
        for i in range(len(products))[:: -1 if turn % 2 else 1]:
            found[i].append(seconds(products[i], counts[i]))
        best.append(seconds(peak, loops))
    return found, best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=FORMATS, metavar="TYPE", help="GGML types")
    parser.add_argument("--rows", type=int, nargs="+", default=COUNTS, help="numbers of rows")
    parser.add_argument("--shape", type=int, nargs=2, default=(256, 2048), metavar=("N", "K"), help="of the matrix")
    parser.add_argument("--segments", type=int, default=1)
    parser.add_argument("--cold", action="store_true", help="read the matrices from memory")
    parser.add_argument("--isa", choices=door.ISAS[1:], default=door.isa())
    parser.add_argument("--panels", type=int, choices=(1, 2), default=0, help="of a tile of many rows")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--against", type=Path, help="another build of the library")
    args = parser.parse_args()
    door.lib().kvasir_set_tile_panels(args.panels)
    loops = compiled()
    peak, per_loop = (loops.peak_avx512, 64 * LOOP) if args.isa == "avx512" else (loops.peak_avx2, 32 * LOOP)
    rate = per_loop / seconds(peak, count_for(peak))
    print(f"{args.isa}, peak {rate / 1e9:.0f} G multiply-adds per second; shares of the peak in percent")
    if args.isa == "avx2":
        fastest = [min(seconds(loop, 10000) for _ in range(args.rounds)) for loop in (peak, loops.dots_avx2)]
        added = fastest[0] / fastest[1]
        print(f"with additions: {100 * added:.0f}")
    print(f"{'':8}{'rows':8}" + "".join(f"{rows:6}" for rows in args.rows))
    paths = [door.PATH, *([args.against] if args.against else [])]
    (n, k), random = args.shape, np.random.default_rng(0)
    for kind in args.formats:
        matrices = matrices_of(kind, n, k, args.segments, args.cold)
        shares: list[list[float]] = [[] for _ in paths]
        ratios: list[float] = []
        for rows in args.rows:
            x = random.standard_normal((rows, k), np.float32)
            products = [Products(loops, path, args.isa, matrices, x) for path in paths]
            times, peaks = rounds_of(products, peak, args.rounds)
            for i, product in enumerate(products):
                same = np.array_equal(product.out.view(np.int32), products[0].out.view(np.int32))
                assert same, f"{kind}, {rows} rows: the libraries' bits differ"
                shares[i].append(100 * rows * n * k / min(times[i]) * min(peaks) / per_loop)
            ratios.append(statistics.median(this / other for this, other in zip(times[0], times[-1], strict=True)))
        for name, row in zip(("this", "other"), shares, strict=False):
            print(f"{kind:8}{name:8}" + "".join(f"{value:6.1f}" for value in row), flush=True)
        if args.against:
            print(f"{'':8}{'ratio':8}" + "".join(f"{value:6.2f}" for value in ratios), flush=True)


if __name__ == "__main__":
    main()
