"""Rates of the machine during the measurement: read bandwidth, arithmetic, and the load of other processes.

Both rates are upper bounds. Reads are repeated over as many bytes as a step reads, so that weights which fit a cache
are compared with that cache. Arithmetic is the instruction that the kernels multiply with, in a loop of nothing else.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvasir.environment import threads_environment
from kvasir.ops import native

BANDWIDTH_METHOD = (
    "reads: CPU: as many bytes as a step reads, at most 256 MiB, by all computing threads and by one, the most over "
    "pieces of 16 MiB (without the native library: numpy's dot of float32 slices with themselves, best of 3 passes); "
    "GPU: torch's sum of 1 GiB of float32, best of 3"
)
ARITHMETIC_METHOD = (
    "CPU: the instruction that multiplies the weights' numbers, on registers, by the processor time of all computing "
    "threads at once, best of 20 passes of each; for the eager executor also torch's product of square matrices of "
    "1024 rows; GPU: torch's, of 8192 rows; both in the model's dtype, best of 3"
)
LARGE = 256 << 20  # bytes, beyond the caches
_PASSES = 3
_SLICES = 32  # in turn, by all threads
_SIZE = 1024  # rows of the matrices that are multiplied on the CPU


@dataclass(frozen=True, slots=True)
class Probe:
    """Bytes read and multiply-adds done per second, the best of a few measurements. macs_per_s is 0 if not known."""

    bytes_per_s: float
    macs_per_s: float


def probe(device: str, numbers: str, threads: int, nbytes: int = LARGE, eager: bool = False) -> Probe:
    """device: "cpu" or "cuda". numbers: which are multiplied, a dtype or "int8". nbytes: what a step reads. eager:
    torch multiplies. Takes a fraction of a second, with `eager` the first time some seconds; nothing else should run
    meanwhile. Raises ConfigError if the threads cannot be created."""
    if device == "cuda":
        return Probe(_bandwidth_gpu(), _arithmetic_gpu(numbers))
    native_numbers = numbers if numbers in native.NUMBERS else "float32"  # others are widened
    macs = native.multiply_rate(native_numbers, threads) if native.available() else 0.0
    if eager or not native.available():
        macs = max(macs, _product(numbers if numbers != "int8" else "float32", threads))
    return Probe(_bandwidth_cpu(threads, min(max(nbytes, 1 << 16), LARGE)), macs)


def _bandwidth_cpu(threads: int, nbytes: int) -> float:
    """The most of all threads and of one: while other programs run, threads may have to wait for each other."""
    import numpy as np

    data = np.ones(nbytes // 8)
    if native.available():
        return max(native.read_rate(data, count) for count in {1, threads})
    slices = np.array_split(data.view(np.float32), _SLICES)
    with ThreadPoolExecutor(threads) as pool:
        return nbytes / _best(lambda: list(pool.map(lambda part: np.dot(part, part), slices)))


def _bandwidth_gpu() -> float:
    import torch

    from kvasir.device import detect, synchronize

    device, values = detect("cuda"), torch.ones(1 << 28, device="cuda")
    return values.numel() * 4 / _best(lambda: (values.sum(), synchronize(device)))


def _arithmetic_gpu(dtype: str) -> float:
    import torch

    from kvasir.device import detect, synchronize

    device, size = detect("cuda"), 8192
    matrix = torch.ones(size, size, device="cuda", dtype=getattr(torch, dtype))
    return size**3 / _best(lambda: (matrix @ matrix, synchronize(device)))


@cache
def _product(dtype: str, threads: int) -> float:
    """Multiply-adds per second of torch's product. In a process of its own, whose number of threads is its own too."""
    code = f"from kvasir.cli.bench.probe import print_product; print_product({dtype!r})"
    environment = threads_environment(threads)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return _SIZE**3 / float(done.stdout)


def print_product(dtype: str) -> None:
    """Prints the seconds of a product of two matrices of _SIZE rows."""
    import torch

    matrix = torch.ones((_SIZE, _SIZE), dtype=getattr(torch, dtype))
    print(_best(lambda: matrix @ matrix))


def _best(work: Callable[[], Any]) -> float:
    work()
    times = []
    for _ in range(_PASSES):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)


class ForeignLoad:
    """Measures the share of the machine's processors that other processes use, from construction to `share`."""

    def __init__(self) -> None:
        self._begun = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """(time of all processors, their busy time, this process's time), in seconds."""
        import psutil

        # Guest time is part of user time on Linux.
        times = {k: v for k, v in psutil.cpu_times()._asdict().items() if not k.startswith("guest")}
        own = psutil.Process().cpu_times()
        idle = times["idle"] + times.get("iowait", 0.0)
        return sum(times.values()), sum(times.values()) - idle, own.user + own.system

    def share(self) -> float:
        """0 for a quiet machine, 1 if other processes used all of it."""
        total, busy, own = (now - then for now, then in zip(self._now(), self._begun, strict=True))
        return min(1.0, max(0.0, (busy - own) / total)) if total > 0 else 0.0
