"""What a fuzz target is, and the promise that it checks: a value or a refusal, within bounds."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from kvasir.errors import KvasirError

CORPUS = Path(__file__).parent / "corpus"
MEMORY = 1 << 30  # bytes that one input may take

MODULES = {
    "adapters": ("adapter",),
    "adapter_steps": ("adapter_step",),
    "loaders": ("safetensors", "index", "gguf", "gguf_model", "folder"),
    "tokenizers": ("sentencepiece", "vocabulary", "tokenizer_files"),
    "answers": ("parser", "schema", "tools", "grammar", "messages", "modelfile"),
    "frames": ("engine_wire", "tier_wire", "record", "manifest", "worker_frame"),
    "transfer": ("transfer_parts", "transfer_answers", "transfer_greeting", "transfer_hello"),
}
NAMES = tuple(name for names in MODULES.values() for name in names)


@dataclass(frozen=True)
class Target:
    """`read` gets the input and checks what it holds to; it raises `refusals` for input that is none, and nothing
    else. mutate: as atheris calls it, or None for changes of bytes alone. words: for libFuzzer's dictionary."""

    read: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...] = (KvasirError,)
    mutate: Callable[[bytes, int, int], bytes] | None = None
    words: tuple[str | bytes, ...] = ()


def load(name: str) -> Target:
    """The target. Imports only what it needs: torch takes seconds."""
    module = next(module for module, names in MODULES.items() if name in names)
    return import_module(f"tests.fuzz.{module}").TARGETS[name]


def attempt(target: Target, data: bytes) -> None:
    """One input. Raises what breaks the promise."""
    try:
        target.read(data)
    except target.refusals as error:
        assert str(error) or not isinstance(error, KvasirError), "a refusal says what was wrong"


@contextmanager
def bounded_memory(budget: int = MEMORY) -> Iterator[None]:
    """Whatever allocates `budget` bytes beyond what the process has now gets a MemoryError (Linux only)."""
    status = Path("/proc/self/status")
    if not status.exists():
        yield
        return
    used = next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("VmData"))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + budget, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@cache
def scratch() -> Path:
    """A folder for the inputs that readers want as files; in memory where the system has such a place."""
    shared = Path("/dev/shm")
    parent = shared if os.access(shared, os.W_OK) else None
    holder = tempfile.TemporaryDirectory(prefix="kvasir-fuzz-", dir=parent)
    _kept.append(holder)
    return Path(holder.name)


_kept: list[tempfile.TemporaryDirectory] = []


def placed(name: str, data: bytes) -> Path:
    """The input as a file of that name."""
    path = scratch() / name
    path.write_bytes(data)
    return path
