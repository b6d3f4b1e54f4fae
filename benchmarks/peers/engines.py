"""Starts the engines: interpreter, environment and model file of each, and the communication with its worker."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.peers.environments import llama_bin, llama_python, missing_llama, missing_vllm, vllm_python
from benchmarks.peers.models import model_folder, model_gguf
from benchmarks.peers.places import ROOT, AnswersTooShort, PeerError
from benchmarks.peers.rows import LLAMA, LLAMA_BENCH, LLAMA_SERVER, OURS, VLLM, VLLM_SERVER, Row

TIMEOUT = 3600.0  # seconds for one reply of a worker


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings shared by all engines. folder: of the peers. binaries: folder of llama.cpp's programs."""

    folder: Path
    binaries: Path
    threads: int
    logs: Path

    def file(self, engine: str, row: Row) -> Path:
        """The engine's model file: safetensors for bf16 models in Kvasir and vLLM, otherwise GGUF. Raises PeerError."""
        folder = row.kind == "bf16" and engine.startswith((OURS, VLLM.partition("-")[0]))
        found = model_folder(self.folder, row.model) if folder else model_gguf(self.folder, row.model, row.kind)
        if not found.exists():
            raise PeerError(f"{found} does not exist: run `make peers`")
        return found


@dataclass(frozen=True, slots=True)
class Engine:
    """One kind of worker. module: that it runs. python: its interpreter. environment: its additional variables.
    missing: the reason why the engine is unavailable, or None."""

    module: str
    python: Callable[[Setup], Path]
    environment: Callable[[Setup], dict[str, str]]
    missing: Callable[[Setup], str | None] = field(default=lambda setup: None)


def vllm_environment(setup: Setup) -> dict[str, str]:
    return {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": f"0-{setup.threads - 1}"}


def llama_environment(setup: Setup) -> dict[str, str]:
    return {"LLAMA_CPP_LIB_PATH": str(llama_bin(setup.folder)), "LLAMA_BIN": str(setup.binaries)}


def our_environment(setup: Setup) -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT / "src")}


def _missing_program(name: str) -> Callable[[Setup], str | None]:
    def missing(setup: Setup) -> str | None:
        there = (setup.binaries / name).exists()
        return None if there else f"{name} is not in {setup.binaries}: run `make peers` or give --llama-bin"

    return missing


ENGINES = {
    OURS: Engine("kvasir", lambda setup: Path(sys.executable), our_environment),
    LLAMA: Engine(
        "llama", lambda s: llama_python(s.folder), llama_environment, missing=lambda s: missing_llama(s.folder)
    ),
    LLAMA_BENCH: Engine(
        "llama_bench", lambda s: Path(sys.executable), llama_environment, _missing_program("llama-batched-bench")
    ),
    VLLM: Engine("vllm", lambda s: vllm_python(s.folder), vllm_environment, lambda s: missing_vllm(s.folder)),
}
MISSING: dict[str, Callable[[Setup], str | None]] = {
    **{name: engine.missing for name, engine in ENGINES.items()},
    LLAMA_SERVER: _missing_program("llama-server"),
    VLLM_SERVER: lambda s: missing_vllm(s.folder),
}


def clean_environment(more: dict[str, str]) -> dict[str, str]:
    """This process's environment without variables that set thread counts of libraries, plus `more`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "KMP_", "GOMP_", "MKL_", "PYTHONPATH"))}
    return {**kept, **more}


class Worker:
    """A worker's process, which the constructor starts. Not thread-safe."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], log: Path):
        self.name = name
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=clean_environment(environment), text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        self.peak_rss = 0  # bytes

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, timeout: float = TIMEOUT, **arguments: Any) -> dict[str, Any]:
        """Sends a command and returns the reply. Raises PeerError if the worker refuses it, ends or takes too long."""
        sending, replies = self._pipes()
        timer = threading.Timer(timeout, self._process.kill)
        timer.start()
        try:
            sending.write(json.dumps({"do": do, **arguments}) + "\n")
            sending.flush()
            line = replies.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise PeerError(f"{self.name} ended: see {self._log}")
        reply = json.loads(line)
        self.peak_rss = max(self.peak_rss, reply["peak_rss"])
        if "error" in reply:
            raise (AnswersTooShort if reply.get("too_short") else PeerError)(f"{self.name}: {reply['error']}")
        return reply["ok"]

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._process.stdin and self._process.stdout
        return self._process.stdin, self._process.stdout

    def close(self) -> None:
        """Waits half a minute for the process to end, then kills it; also kills processes that it left running."""
        sending, replies = self._pipes()
        below = children(self._process.pid)
        with contextlib.suppress(BrokenPipeError):
            sending.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        kill(below)
        replies.close()


def children(pid: int) -> list[psutil.Process]:
    """All descendants of this process."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def start(name: str, setup: Setup) -> Worker:
    """A worker without a model. Raises PeerError if the engine is not installed."""
    engine = ENGINES[name]
    if missing := engine.missing(setup):
        raise PeerError(missing)
    command = [str(engine.python(setup)), "-m", f"benchmarks.peers.workers.{engine.module}"]
    return Worker(name, command, engine.environment(setup), setup.logs / f"{name}.log")
