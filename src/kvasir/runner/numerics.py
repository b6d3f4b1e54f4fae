"""The numerics version: what the bits of answers were computed by, as one digest. It guards whatever is stored.

It is never set by hand. It says too much rather than too little: a comment changes it as well, which costs no more than
what was stored. Instruction sets enter for the libraries under the eager executor only: the bits of our kernels do not
depend on them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

from kvasir.device.libraries import library_facts
from kvasir.ops import native
from kvasir.runner.probe import probe

PACKAGE = Path(__file__).parents[1]
ROOMS = ("ops", "parallel", "quant", "layers", "models", "weights", "sampling", "program", "runner")


def numerics_version(executor: str, device: str, op_table: Iterable[str], kind: str = "cpu") -> str:
    """SHA-256, in hexadecimal, of the native kernels' sources, the package's, the executor and what that stands on.

    A program stands on nothing else. Eager stands on torch and its libraries: on the processor or GPU called `device`
    (kind: "cpu" or "cuda") and the settings that they choose kernels by, on the bits that these compute here, and on
    the implementation of each op, of which `op_table` has a line.
    """
    kernels = native.sources_digest() if native.available() else "no native kernels"
    beneath = (torch.__version__, device, *op_table, *_libraries(kind)) if executor == "eager" else ()
    return _digest((kernels, _own_sources(), executor, *beneath))


def _libraries(kind: str) -> tuple[str, ...]:
    return (*library_facts(kind), probe(kind))


@cache
def _own_sources() -> str:
    return sources_digest(PACKAGE, ROOMS)


def sources_digest(package: Path, rooms: Iterable[str]) -> str:
    """SHA-256, in hexadecimal, of names and contents of all Python files in these folders of `package`."""
    paths = sorted(path.relative_to(package).as_posix() for room in rooms for path in (package / room).rglob("*.py"))
    assert paths, f"{package} holds no sources"
    return _digest(f"{hashlib.sha256((package / path).read_bytes()).hexdigest()} {path}" for path in paths)


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()
