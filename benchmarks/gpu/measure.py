"""Times of work on a device, and work recorded for replays."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from kvasir.ops.launch import recorded

Run = Callable[[], None]
LEAST_RUNS, LEAST_SECONDS, MOST_RUNS = 5, 0.2, 50


@dataclass(frozen=True)
class Place:
    """Where to measure. device: "cuda", or "cpu" for a trial in Triton's interpreter, whose times mean nothing."""

    device: str

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    def record(self) -> Callable[[Run], Run]:
        """What records launches; all replays of one recorder share memory."""
        if not self.is_cuda:
            return recorded
        from kvasir.device.replays import Recorder

        return Recorder().record

    def seconds(self, run: Run) -> dict[str, Any]:
        """Times of runs, after a first one: median, least and most in milliseconds."""
        run()
        self.wait()
        times: list[float] = []
        least = LEAST_RUNS if self.is_cuda else 1
        while len(times) < least or (self.is_cuda and sum(times) < LEAST_SECONDS and len(times) < MOST_RUNS):
            times.append(self._once(run))
        found = {"median": median(times), "min": min(times), "max": max(times)}
        return {**{name: round(1e3 * value, 5) for name, value in found.items()}, "runs": len(times)}

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def free_bytes(self) -> int:
        """Of the device's memory."""
        return torch.cuda.mem_get_info()[0] if self.is_cuda else 1 << 32

    def capability(self) -> int:
        """90 for sm_90, 0 without a GPU."""
        major, minor = torch.cuda.get_device_capability(0) if self.is_cuda else (0, 0)
        return 10 * major + minor

    def l2_bytes(self) -> int:
        return torch.cuda.get_device_properties(0).L2_cache_size if self.is_cuda else 0

    def _once(self, run: Run) -> float:
        if not self.is_cuda:
            begun = time.perf_counter()
            run()
            return time.perf_counter() - begun
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def clocks() -> dict[str, Any]:
    """Clocks, temperature and power by nvidia-smi, as text; empty without it."""
    names = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu", "power.draw")
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", "--id=0"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(names, (part.strip() for part in line.split(",")), strict=False))
