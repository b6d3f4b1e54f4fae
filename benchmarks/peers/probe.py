"""Properties of the machine during a measurement: bandwidth, arithmetic, and the CPU share of other programs."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

SOURCE = Path(__file__).with_name("probe.c")
METHODS = {
    "probe.c": "best of 5 passes: reads of 512 MiB in four streams per thread; on registers vpdpbusd and vdpbf16ps, or "
    "else vpmaddubsw (sums widened at once, or after eight for 4 bits) and vfmadd231ps",
    "kvasir.cli.bench.probe": "no C compiler for probe.c: see BANDWIDTH_METHOD and ARITHMETIC_METHOD there",
}


@dataclass(frozen=True, slots=True)
class Rates:
    """Current maximum rates per second; 0 if one was not measured. int4: of int8 and weights of 4 bits."""

    bytes_per_s: float
    int8_macs_per_s: float
    int4_macs_per_s: float
    bf16_macs_per_s: float
    method: str


def rates(threads: int) -> Rates:
    """Measures for about a second; no other program should run."""
    program = _program(SOURCE)
    if program is None:
        from kvasir.cli.bench.probe import probe

        gave = probe("cpu", "bfloat16", threads)
        return Rates(gave.bytes_per_s, 0.0, 0.0, gave.macs_per_s, "kvasir.cli.bench.probe")
    ran = subprocess.run([program, str(threads)], capture_output=True, text=True, check=True)
    return Rates(**json.loads(ran.stdout), method="probe.c")


@cache
def _program(source: Path) -> Path | None:
    """The compiled probe.c; None if there is no compiler, or if the program does not run."""
    program = Path(tempfile.mkdtemp(prefix="kvasir-probe-")) / "probe"
    command = ["gcc", "-O3", "-march=native", "-pthread", source, "-o", program]
    try:
        subprocess.run(command, capture_output=True, check=True)
        subprocess.run([program, "1", "1"], capture_output=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return program


class Foreign:
    """The share of the CPU time that other programs used between the construction and `share`. pids: of the measured
    programs, which are counted with their descendants. Time stolen by a hypervisor counts as other programs' time."""

    def __init__(self, pids: Iterable[int]):
        self._pids = tuple(pids)
        self._total, self._busy = machine_seconds()
        self._own = cpu_seconds(self._pids)

    def share(self) -> float:
        """0 if no other program ran, 1 if other programs used all CPU time."""
        total, busy = machine_seconds()
        own = cpu_seconds(self._pids) - self._own
        spent = total - self._total
        return min(1.0, max(0.0, (busy - self._busy - own) / spent)) if spent > 0 else 0.0


def machine_seconds() -> tuple[float, float]:
    """(total time, busy time) of all processors, in seconds."""
    # Guest time is part of user time on Linux.
    times = {k: v for k, v in psutil.cpu_times()._asdict().items() if not k.startswith("guest")}
    total = sum(times.values())
    return total, total - times["idle"] - times.get("iowait", 0.0)


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time of these processes and their descendants; 0 for a process that has ended."""
    total = 0.0
    for pid in pids:
        try:
            process = psutil.Process(pid)
            for one in (process, *process.children(recursive=True)):
                times = one.cpu_times()
                total += times.user + times.system + getattr(times, "children_user", 0.0)
                total += getattr(times, "children_system", 0.0)
        except psutil.NoSuchProcess:
            pass
    return total
