"""Facts about this machine and this installation as plain values: for the doctor and for benchmark results."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from kvasir import __version__

PACKAGE = Path(__file__).parents[1]


def machine_facts() -> dict[str, Any]:
    """The processor, cores and memory (within the control group's limits), the operating system, and the GPU or
    None."""
    from kvasir.device import detect

    cpu, best = detect("cpu"), detect("auto")
    return {
        "cpu": cpu.name,
        "cores": cpu.threads,
        "logical_cpus": os.cpu_count(),
        "features": list(cpu.features),
        "memory_bytes": cpu.memory_total,
        "memory_available_bytes": cpu.memory_available,
        "gpu": None if best.kind == "cpu" else {"name": best.name, "memory_bytes": best.memory_total},
        "system": platform.platform(),
    }


def versions(names: Iterable[str]) -> dict[str, str | None]:
    """Installed versions by distribution name; None for a distribution that is not installed. Imports nothing."""
    return {name: _version(name) for name in names}


def software_facts() -> dict[str, Any]:
    return {
        "kvasir": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        **versions(("torch", "numpy")),
    }


def commit() -> str | None:
    """The commit of the checkout that the package runs from, with "+changes" if files are modified; None without a
    checkout."""
    root = PACKAGE.parents[1]
    if not (root / ".git").exists() or PACKAGE.parent.name != "src":
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        return head + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    command = ("git", "-C", str(root), *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
