"""The server under soak: two processes, their keys, and everything that must be back at its base line at rest."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tests.e2e.server import SRC, engine_pid
from tests.soak.work import MODEL

FREE, BATCH, LIMITED = "free-key-free", "batch-key-batch", "limited-key-limited"
KEYS = [
    {"key": FREE, "name": "free", "weight": 2},
    {"key": BATCH, "name": "batch", "limits": {"max_class": "batch"}},
    {"key": LIMITED, "name": "limited", "limits": {"requests_per_minute": 120, "concurrent": 2}},
]
# Rows and blocks for a few answers only, so that they are preempted and prefixes evicted all the time.
SMALL = ("--max-num-seqs", "12", "--block-size", "16", "--num-blocks", "96", "--max-num-batched-tokens", "128")
DISK = 1 << 18  # bytes: a few blocks, full at once and ever again
MORE_BYTES = 96 << 20  # that a process may hold beyond its base line: freed memory that the allocator keeps
NOTICE = 2.0  # seconds
CHILDREN = 3  # the engine and two renderers of chat templates, which start when they are needed
MORE_THREADS = 40  # the default pool of asyncio.to_thread grows to 32 and stays
# What must have happened in a soak that is worth its name.
EVENTS = ("preemptions", "prefix_hit_tokens", "prefix_evicted_blocks", "tier_hit_tokens", "tier_evicted")
GAUGES = ("http_requests_open", "requests_open", "answers_running", "answers_waiting", "kv_usage_ratio")


@dataclass(frozen=True)
class Facts:
    """What a process holds."""

    fds: int
    threads: int
    bytes: int
    children: int

    @classmethod
    def of(cls, pid: int) -> Facts:
        process = psutil.Process(pid)
        return cls(
            process.num_fds(), process.num_threads(), process.memory_info().rss, len(process.children(recursive=True))
        )

    def excess(self, base: Facts) -> list[str]:
        """What is above the base line."""
        # A renderer that was not there at the base line has one pipe.
        bounds = {"fds": base.fds + max(0, self.children - base.children), "threads": base.threads + MORE_THREADS}
        bounds |= {"bytes": base.bytes + MORE_BYTES, "children": max(base.children, CHILDREN)}
        return [f"{n}: {getattr(self, n)}, at most {most}" for n, most in bounds.items() if getattr(self, n) > most]


class Server:
    """A running `kvasir serve`; `log` is what it prints."""

    def __init__(self, base: str, process: subprocess.Popen, log: Path):
        self.base = base
        self.process = process
        self.log = log
        self._killed: list[float] = []

    @property
    def kills(self) -> int:
        return len(self._killed)

    @property
    def noticed_kills(self) -> int:
        """Those that a request sent now cannot fall into: the server sees a death a moment late."""
        return sum(t < time.monotonic() - NOTICE for t in self._killed)

    @property
    def engine(self) -> int:
        return engine_pid(self.process)

    async def kill_engine(self) -> bool:
        """False when there was none to kill, since it was just being started."""
        try:
            os.kill(self.engine, signal.SIGKILL)
        except (AssertionError, psutil.Error, ProcessLookupError):
            return False
        self._killed.append(time.monotonic())
        return True

    async def stop_engine(self, seconds: float) -> None:
        """It stands still for so long, as on a machine that is busy with something else."""
        try:
            pid = self.engine
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
        except (AssertionError, psutil.Error, ProcessLookupError):
            return

    async def refuse_disk(self, seconds: float) -> None:
        """No file of the engine can grow for so long, as on a disk that is full."""
        try:
            pid = self.engine
            before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            await asyncio.sleep(seconds)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        except (AssertionError, psutil.Error, ProcessLookupError):
            return

    async def metrics(self) -> dict[str, float]:
        """Sums over labels, by name; without the engine's while it does not answer."""
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {FREE}", "connection": "close"}) as http:
            text = (await http.get(f"{self.base}/metrics", timeout=30)).text
        pattern = r"^kvasir_(\w+)(?:\{[^}]*\})? ([0-9.e+-]+)$"
        found: dict[str, float] = {}
        for name, value in re.findall(pattern, text, re.M):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    async def rest(self, seconds: float = 60.0) -> list[str]:
        """Waits until nothing is under way; the gauges that do not come back to zero."""
        left = ["no metrics"]
        for _ in range(int(seconds / 0.1)):
            now = await self.metrics()
            # The scrape itself is one open request.
            left = [f"{n}: {now.get(n)}" for n in GAUGES if now.get(n) != (1 if n == "http_requests_open" else 0)]
            if not left:
                break
            await asyncio.sleep(0.1)
        return left

    async def facts(self) -> dict[str, Facts]:
        return {"server": Facts.of(self.process.pid), "engine": Facts.of(self.engine)}

    async def leaks(self, base: dict[str, Facts], seconds: float = 5.0) -> list[str]:
        """What is not back at the base line after so long."""
        found = await self.rest()
        if found:
            return found
        for _ in range(int(seconds / 0.25)):
            now = await self.facts()
            found = [f"{who} {what}" for who in base for what in now[who].excess(base[who])]
            if (held := self._disk_bytes()) > DISK:
                found.append(f"disk tier {held} bytes, at most {DISK}")
            if not found:
                break
            await asyncio.sleep(0.25)
        return found

    def _disk_bytes(self) -> int:
        """Of all files in the disk tier's folder, whatever they are called."""
        return sum(f.stat().st_size for f in (self.log.parent / "tier").rglob("*") if f.is_file())

    def complaints(self) -> list[str]:
        """Lines of the log that no fault of ours explains: deaths by anything but SIGKILL, tracebacks."""
        lines = self.log.read_text(errors="replace").splitlines()
        deaths = [line for line in lines if "the engine process ended with status" in line]
        found = [line for line in deaths if "status -9;" not in line]
        if len(deaths) > self.kills:
            found.append(f"{len(deaths)} deaths of the engine, {self.kills} by the soak")
        return found + [line for line in lines if re.match(r"Traceback|AssertionError|\w*Warning", line)]


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Server]:
    """A server with three keys and little memory. At the end it is asked to stop and must do so with status 0."""
    keys, log = folder / "keys.json", folder / "server.log"
    keys.write_text(json.dumps(KEYS))
    keys.chmod(0o600)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "kvasir.cli", "serve", MODEL, "--port", str(port), "--keys", str(keys), *SMALL]
    command += ["--cache-dir", str(folder / "tier"), "--cache-disk", str(DISK)]
    env = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        await _healthy(server)
        yield server
        process.send_signal(signal.SIGTERM)
        status = await asyncio.to_thread(process.wait, 60)
        assert status in (0, -signal.SIGTERM), f"the server ended with status {status}"
    finally:
        process.kill()
        process.wait()


async def _healthy(server: Server) -> None:
    async with httpx.AsyncClient() as http:
        for _ in range(1200):
            assert server.process.poll() is None, f"the server ended:\n{server.log.read_text()}"
            try:
                if (await http.get(f"{server.base}/health", timeout=5)).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.1)
    raise AssertionError("the server did not become healthy")
