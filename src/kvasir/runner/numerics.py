"""The numerics version: a digest of everything that can change the bits of results. It guards all stored blocks.

It is computed, never set by hand. It errs on the side of covering too much: even an edited comment changes it, which
costs no more than the stored blocks. Instruction sets are part of it only for the libraries of the eager executor: the
bits of the native kernels do not depend on them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path

from kvasir.ops import native

PACKAGE = Path(__file__).parents[1]
SOURCE_PACKAGES = (
    "ops",
    "parallel",
    "quant",
    "layers",
    "models",
    "weights",
    "lora",
    "sampling",
    "program",
    "graph",
    "runner",
)


def numerics_version(executor: str, device: str, op_table: Iterable[str], kind: str = "cpu") -> str:
    """SHA-256, in hexadecimal, of the sources of the native kernels and the package, the executor's name, and what the
    executor depends on.

    A program depends on nothing else. A graph depends on Triton, which compiles its kernels, and on the GPU. Eager
    depends on torch and its libraries: on the processor or GPU named `device` (kind: "cpu" or "cuda"), on the settings
    by which they choose kernels, on the bits that they compute here, and on the implementation of each op, one line of
    `op_table` each.
    """
    kernels = native.sources_digest() if native.available() else "no native kernels"
    beneath = _libraries(device, op_table, kind) if executor == "eager" else ()
    if executor == "graph":
        beneath = (version("triton"), device, kind)
    return _digest((kernels, package_digest(), executor, *beneath))


def _libraries(device: str, op_table: Iterable[str], kind: str) -> tuple[str, ...]:
    import torch

    from kvasir.device.libraries import library_facts
    from kvasir.runner.probe import probe

    return (torch.__version__, device, *op_table, *library_facts(kind), probe(kind))


@cache
def package_digest() -> str:
    """`sources_digest` of this package, computed once."""
    return sources_digest(PACKAGE, SOURCE_PACKAGES)


def sources_digest(package: Path, rooms: Iterable[str]) -> str:
    """SHA-256, in hexadecimal, of the paths and contents of all Python files in the folders `rooms` of `package`."""
    paths = sorted(path.relative_to(package).as_posix() for room in rooms for path in (package / room).rglob("*.py"))
    assert paths, f"{package} contains no sources"
    return _digest(f"{hashlib.sha256((package / path).read_bytes()).hexdigest()} {path}" for path in paths)


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()
