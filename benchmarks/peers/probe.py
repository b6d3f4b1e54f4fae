"""What the machine gives beside a measurement: bandwidth, arithmetic, and the share that other programs take."""

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
    "probe.c": "best of 5 passes: reads of 512 MiB in four streams per thread; vpdpbusd and vdpbf16ps on registers",
    "kvasir.cli.bench.probe": "no C compiler for probe.c: see BANDWIDTH_METHOD and ARITHMETIC_METHOD there",
}


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second, at best, just now; 0 where this machine has no instruction for it, or it was not measured."""

    bytes_per_s: float
    int8_macs_per_s: float
    bf16_macs_per_s: float
    method: str


def rates(threads: int) -> Rates:
    """Takes about a second; nothing else should run."""
    program = _program(SOURCE)
    if program is None:
        from kvasir.cli.bench.probe import probe

        gave = probe("cpu", "bfloat16", threads)
        return Rates(gave.bytes_per_s, 0.0, gave.macs_per_s, "kvasir.cli.bench.probe")
    ran = subprocess.run([program, str(threads)], capture_output=True, text=True, check=True)
    return Rates(**json.loads(ran.stdout), method="probe.c")


@cache
def _program(source: Path) -> Path | None:
    """probe.c, compiled; None where there is no compiler, or where what it made does not run."""
    program = Path(tempfile.mkdtemp(prefix="kvasir-probe-")) / "probe"
    command = ["gcc", "-O3", "-march=native", "-pthread", source, "-o", program]
    try:
        subprocess.run(command, capture_output=True, check=True)
        subprocess.run([program, "1", "1"], capture_output=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return program


class Foreign:
    """Which share of the processors' time others took: begins now, `share` ends it. pids: of the programs measured,
    which count with all that they started. What a hypervisor took away counts as others'."""

    def __init__(self, pids: Iterable[int]):
        self._pids = tuple(pids)
        self._total, self._busy = machine_seconds()
        self._own = cpu_seconds(self._pids)

    def share(self) -> float:
        """0 for a quiet machine, 1 where others had all of it."""
        total, busy = machine_seconds()
        own = cpu_seconds(self._pids) - self._own
        spent = total - self._total
        return min(1.0, max(0.0, (busy - self._busy - own) / spent)) if spent > 0 else 0.0


def machine_seconds() -> tuple[float, float]:
    """(all processors' time, their busy time), in seconds."""
    # Guest time is part of user time on Linux.
    times = {k: v for k, v in psutil.cpu_times()._asdict().items() if not k.startswith("guest")}
    total = sum(times.values())
    return total, total - times["idle"] - times.get("iowait", 0.0)


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time of these processes and of all that they started; 0 for a process that is gone."""
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
