"""Rates of the machine during the measurement: read bandwidth, arithmetic, and the load of other processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvasir.environment import threads_environment

BANDWIDTH_METHOD = (
    "reads: CPU: numpy's dot of float32 slices of 8 MiB with themselves over 256 MiB, one Python thread per "
    "computing thread, best of 3 passes; GPU: torch's sum of 1 GiB of float32, best of 3"
)
ARITHMETIC_METHOD = (
    "product of square matrices, best of 3; CPU: numpy's, of 1024 float32 rows; GPU: torch's, of 8192 rows in the "
    "model's dtype"
)
_PASSES = 3
_SLICE = 2 << 20  # float32 values
_SLICES = 32
_SIZE = 1024  # rows of the matrices that are multiplied on the CPU


@dataclass(frozen=True, slots=True)
class Probe:
    """Bytes read and multiply-adds done per second, the best of a few measurements."""

    bytes_per_s: float
    macs_per_s: float


def probe(device: str, dtype: str, threads: int) -> Probe:
    """device: "cpu" or "cuda". Takes a fraction of a second; nothing else should run meanwhile."""
    bandwidth = _bandwidth_gpu() if device == "cuda" else _bandwidth_cpu(threads)
    return Probe(bandwidth, _arithmetic_gpu(dtype) if device == "cuda" else _arithmetic_cpu(threads))


def _bandwidth_cpu(threads: int) -> float:
    import numpy as np

    slices = np.split(np.ones(_SLICES * _SLICE, np.float32), _SLICES)
    with ThreadPoolExecutor(threads) as pool:
        seconds = _best(lambda: list(pool.map(lambda part: np.dot(part, part), slices)))
    return _SLICES * _SLICE * 4 / seconds


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


def _arithmetic_cpu(threads: int) -> float:
    """Measured in a process of its own: numpy's library takes its number of threads from the environment, once."""
    command = [sys.executable, "-c", "from kvasir.cli.bench.probe import print_product; print_product()"]
    done = subprocess.run(command, env=threads_environment(threads), capture_output=True, text=True, check=True)
    return _SIZE**3 / float(done.stdout)


def print_product() -> None:
    """Prints the seconds of a product of two matrices of _SIZE rows."""
    import numpy as np

    matrix = np.ones((_SIZE, _SIZE), np.float32)
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
