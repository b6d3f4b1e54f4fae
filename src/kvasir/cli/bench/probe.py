"""Rates of the machine during the measurement: read bandwidth, arithmetic, and the load of other processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

BANDWIDTH_METHOD = (
    "reads: CPU: numpy's dot of float32 slices of 8 MiB with themselves over 256 MiB, one Python thread per "
    "computing thread, best of 3 passes; GPU: torch's sum of 1 GiB of float32, best of 3"
)
ARITHMETIC_METHOD = "torch's product of square matrices (CPU 1024, GPU 8192) in the model's dtype, best of 3"
_PASSES = 3
_SLICE = 2 << 20  # float32 values
_SLICES = 32


@dataclass(frozen=True, slots=True)
class Probe:
    """Bytes read and multiply-adds done per second, the best of a few measurements."""

    bytes_per_s: float
    macs_per_s: float


def probe(device: str, dtype: str, threads: int) -> Probe:
    """device: "cpu" or "cuda". Takes a fraction of a second; nothing else should run meanwhile."""
    bandwidth = _bandwidth_gpu() if device == "cuda" else _bandwidth_cpu(threads)
    return Probe(bandwidth, _arithmetic(device, dtype, threads))


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


def _arithmetic(device: str, dtype: str, threads: int) -> float:
    import torch

    from kvasir.device import detect, set_threads, synchronize

    set_threads(threads)
    size, record = 8192 if device == "cuda" else 1024, detect(device)
    matrix = torch.ones(size, size, device=device, dtype=getattr(torch, dtype))
    return size**3 / _best(lambda: (matrix @ matrix, synchronize(record)))


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
