"""The host memory that this process may use, from the machine's memory and the control group's limit; and the memory
that an engine needs besides its KV cache.

Sources: the Linux kernel's documentation of /proc/meminfo and of control groups, version 1 and 2.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # version 1 reports "no limit" as a number close to 2^63


# Kept free on the device, for memory that grows under load and cannot be counted in advance: requests and their text,
# the prefix tree, tokenizers, processes for templates and grammars; on a GPU, library workspaces and fragmentation.
HEADROOM = 192 << 20
QUEUE_BYTES = 256 << 20  # of each queue to and from a tier, if there is enough memory


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that an engine needs besides its KV cache. The weights are loaded already when it is created.

    weights: all weights. mapped: weights in mapped pages of their file: the system counts these as free, but each step
    reads them. buffers: of a step. samplers: of sampling. angles, rows: bytes per position of the served context.
    """

    weights: int = 0
    mapped: int = 0
    buffers: int = 0
    samplers: int = 0
    angles: int = 0
    rows: int = 0

    def to_come(self, length: int) -> int:
        """Bytes that are not allocated yet, for contexts of `length` tokens."""
        return self.mapped + self.buffers + self.samplers + (self.angles + self.rows) * length


def host_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> tuple[int, int]:
    """(total, available) bytes of host memory. Reclaimable page cache counts as available."""
    total, available = _machine(meminfo)
    for limit, used in _cgroup(cgroup):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return total, available


def _machine(meminfo: Path) -> tuple[int, int]:
    if not meminfo.exists():
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total // 2
    lines = (line.split() for line in meminfo.read_text().splitlines())
    kibibytes = {fields[0].rstrip(":"): int(fields[1]) for fields in lines if len(fields) > 1}
    return kibibytes["MemTotal"] << 10, kibibytes["MemAvailable"] << 10


def _cgroup(root: Path) -> list[tuple[int, int]]:
    """(limit, used) in bytes of the process's control group and its ancestors, as far as they are visible."""
    found = []
    for folder in _groups(root):
        for limit_name, used_name, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit = _number(folder / limit_name)
            if limit is not None and limit < _UNLIMITED:
                stat = folder / "memory.stat"
                cache = sum(_stat(stat, f"{prefix}{key}") for key in ("inactive_file", "active_file"))
                found.append((limit, max(0, (_number(folder / used_name) or 0) - cache)))
    return found


def _groups(root: Path) -> list[Path]:
    """All folders from the process's control group up to the root, for both versions."""
    own = Path("/proc/self/cgroup")
    folders = {root, root / "memory"}
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        base = root / "memory" if "memory" in controllers.split(",") else root
        group = Path(path.lstrip("/"))
        folders |= {base / part for part in (group, *group.parents)}
    return sorted(folders)


def _number(path: Path) -> int | None:
    """The number in a file; None if the file is absent or contains "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _stat(path: Path, key: str) -> int:
    try:
        lines = (line.split() for line in path.read_text().splitlines())
        return next((int(fields[1]) for fields in lines if fields[0] == key), 0)
    except (OSError, ValueError, IndexError):
        return 0
