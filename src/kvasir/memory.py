"""How much memory this process may use on the host: what the machine has, within its control group's limit. And what an
engine needs of it beside keys and values.

Sources: the Linux kernel's documentation of /proc/meminfo and of control groups, version 1 and 2.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # version 1 says "no limit" by a number close to 2^63


# Kept free on the device, for what grows under load and cannot be counted before: requests and their text, the prefix
# tree, tokenizers, processes for templates and grammars; on a GPU the library's workspaces and fragments.
HEADROOM = 192 << 20
QUEUE_BYTES = 256 << 20  # of each queue to and from a tier, where the memory is there


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of an engine beside keys and values. The weights are loaded when it is made.

    mapped: of the weights, what stays in pages of its file: the system counts them as free, each step reads them.
    buffers: of a step. samplers: of choosing tokens. angles, rows: per position of the served context.
    """

    weights: int = 0
    mapped: int = 0
    buffers: int = 0
    samplers: int = 0
    angles: int = 0
    rows: int = 0

    def to_come(self, length: int) -> int:
        """What is not taken yet, for contexts of `length` tokens."""
        return self.mapped + self.buffers + self.samplers + (self.angles + self.rows) * length


def host_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> tuple[int, int]:
    """(total, available) bytes. Page cache that can be given back counts as available."""
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
    """(limit, used) of the process's own group and of the groups above it, where they can be seen."""
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
    """Every folder from the process's own control group up to the root, of both versions."""
    own = Path("/proc/self/cgroup")
    folders = {root, root / "memory"}
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        base = root / "memory" if "memory" in controllers.split(",") else root
        group = Path(path.lstrip("/"))
        folders |= {base / part for part in (group, *group.parents)}
    return sorted(folders)


def _number(path: Path) -> int | None:
    """None where the file is absent or says "max"."""
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
