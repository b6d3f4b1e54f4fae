"""The capability record: what the machine offers, detected once at start."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvasir.device.torch_extra import has_torch, need_torch
from kvasir.errors import ConfigError
from kvasir.memory import host_memory

# Relevant features, by the names of /proc/cpuinfo.
_FEATURES = """
    avx2 fma f16c avx512f avx512bw avx512vl avx512_vnni avx512_bf16 avx512_fp16 avx_vnni amx_bf16 amx_int8
    asimd asimddp bf16 i8mm sve
    """.split()
# One of these exists where a driver serves a GPU: of NVIDIA, AMD, or Windows to its Linux.
_GPU_DRIVERS = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/kfd", "/dev/dxg")


@dataclass(frozen=True, slots=True)
class Device:
    """The device on which a model runs. kind: "cpu" or "cuda". Memory in bytes, at the time of detection.

    threads: physical cores that this process may run on; processors: their hardware threads; both within the CPU quota
    of its control group. features: instruction set extensions of the CPU, or the compute capability ("sm_90") of the
    GPU.
    """

    kind: str
    name: str
    memory_total: int
    memory_available: int
    threads: int
    processors: int
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        gib = 1 << 30
        return (
            f"{self.name} ({self.kind}, {self.threads} threads, "
            f"{self.memory_available / gib:.1f} of {self.memory_total / gib:.1f} GiB free)"
        )


def detect(kind: str = "auto") -> Device:
    """Makes the record of the requested device; "auto" is a GPU if torch finds one, else the CPU.

    Imports torch for "cuda", and for "auto" if the system has a GPU's driver. Raises ConfigError for an unknown kind,
    or for "cuda" without torch or without a GPU.
    """
    if kind not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"unknown device {kind!r}", "choose auto, cpu or cuda")
    if kind == "cuda":
        need_torch("device cuda is selected")
    may_have_gpu = kind == "cuda" or (kind == "auto" and has_driver() and has_torch())
    if may_have_gpu and _sees_gpu():
        return _gpu()
    if kind == "cuda":
        raise ConfigError("device cuda is selected, but torch sees no GPU", "use --device cpu")
    return _cpu()


def has_driver(paths: Iterable[str] = _GPU_DRIVERS) -> bool:
    """Whether the system may have a GPU. A look at its files, since importing torch takes seconds."""
    return sys.platform == "win32" or any(map(os.path.exists, paths))


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _cpu() -> Device:
    total, available = host_memory()
    name, flags = _cpuinfo()
    return Device("cpu", name, total, available, *core_counts(), tuple(f for f in _FEATURES if f in flags))


def _gpu() -> Device:
    import torch

    free, total = torch.cuda.mem_get_info()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    capability = f"sm_{properties.major}{properties.minor}"
    return Device("cuda", properties.name, total, free, *core_counts(), (capability,))


def core_counts(root: Path = Path("/sys")) -> tuple[int, int]:
    """Physical cores and processors in this process's affinity mask, within its control group's quota."""
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
        cores = len({_siblings(root, processor) for processor in allowed})
        processors = len(allowed)
    else:
        cores = processors = os.cpu_count() or 1
    try:
        quota, period = (root / "fs/cgroup/cpu.max").read_text().split()
        granted = max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no such file, or "max"
        granted = processors
    return min(cores, granted), min(processors, granted)


def processors_by_core(root: Path = Path("/sys")) -> list[tuple[int, ...]]:
    """The processors in this process's affinity mask, those of a core together, in ascending order."""
    if not hasattr(os, "sched_getaffinity"):
        return [(i,) for i in range(os.cpu_count() or 1)]
    cores: dict[str, list[int]] = {}
    for processor in sorted(os.sched_getaffinity(0)):
        cores.setdefault(_siblings(root, processor), []).append(processor)
    return [tuple(found) for found in cores.values()]


def _siblings(root: Path, processor: int) -> str:
    """The hardware threads of a processor's core; the processor alone if the system does not report them."""
    try:
        path = root / f"devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
        return path.read_text().strip()
    except OSError:
        return str(processor)


def processor_flags() -> set[str]:
    """The instruction set extensions of the processor, by the names of /proc/cpuinfo; empty without that file."""
    return _cpuinfo()[1]


def _cpuinfo(path: Path = Path("/proc/cpuinfo")) -> tuple[str, set[str]]:
    try:
        lines = [line.partition(":") for line in path.read_text().splitlines()]
    except OSError:
        return platform.processor() or platform.machine(), set()
    values = {key.strip(): value.strip() for key, _, value in reversed(lines)}
    name = values.get("model name") or platform.machine()
    return name, set((values.get("flags") or values.get("Features") or "").split())
