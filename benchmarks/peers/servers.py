"""The HTTP servers of the comparison, each started on a free port."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

from benchmarks.peers.engines import (
    MISSING,
    Setup,
    children,
    clean_environment,
    kill,
    our_environment,
    vllm_environment,
)
from benchmarks.peers.environments import vllm_python
from benchmarks.peers.http_load import load
from benchmarks.peers.places import ROOT, PeerError
from benchmarks.peers.rows import LLAMA_SERVER, OUR_SERVER, VLLM_SERVER, Row

READY = 600.0  # seconds until a server must be ready
BLOCK = 64  # spare tokens after the prompt and the new tokens


def _commands(setup: Setup, row: Row, model: str, port: int) -> dict[str, list[str]]:
    length = row.prompt + row.new + BLOCK
    return {
        OUR_SERVER: [
            *(sys.executable, "-m", "kvasir.cli", "serve", model, "--port", str(port), "--threads", str(setup.threads)),
            *("--max-model-len", str(length), "--max-num-seqs", str(row.users)),
        ],
        LLAMA_SERVER: [
            *(str(setup.binaries / "llama-server"), "-m", model, "--port", str(port), "-t", str(setup.threads)),
            *("-tb", str(setup.threads), "-np", str(row.users), "-c", str(row.users * length), "--cache-ram", "0"),
        ],
        VLLM_SERVER: [
            *(str(vllm_python(setup.folder)), "-m", "vllm.entrypoints.openai.api_server", "--model", model),
            *("--port", str(port), "--dtype", "bfloat16", "--max-model-len", str(length)),
            *("--max-num-seqs", str(row.users), "--no-enable-prefix-caching", "--disable-uvicorn-access-log"),
        ],
    }  # fmt: skip


class Server:
    """A server's process. The client is this process, so neither counts as foreign load."""

    def __init__(self, name: str, setup: Setup, row: Row):
        """Returns when the server is ready. Raises PeerError."""
        if (find := MISSING.get(name)) and (missing := find(setup)):
            raise PeerError(missing)
        self.name, self.pids, self.peak_rss = name, (os.getpid(),), 0
        self._model, port = str(setup.file(name, row)), _free_port()
        self._url = f"http://127.0.0.1:{port}"
        self.command = _commands(setup, row, self._model, port)[name]
        environment = clean_environment({**our_environment(setup), **vllm_environment(setup)})
        if name != OUR_SERVER:
            del environment["PYTHONPATH"]
        self._log = setup.logs / f"{name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        begun = time.perf_counter()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(self.command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise
        self.facts = {"command": self.command, "ready_s": time.perf_counter() - begun}

    def measure(self, row: Row, prompts: Sequence[Sequence[int]], new: int) -> dict[str, float]:
        return asyncio.run(load(self._url, self._model, prompts, new, row.users))

    def close(self) -> None:
        below = children(self._process.pid)
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        kill(below)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise PeerError(f"{self.name} ended: see {self._log}")
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=5) as reply:
                    if reply.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.2)
        raise PeerError(f"{self.name} is not ready after {READY:.0f} s: see {self._log}")


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]
