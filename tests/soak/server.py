"""The server under soak: its processes, their keys, and everything that must be back at its base line at rest."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.composition.adapters import on_linears
from tests.e2e.server import SRC, engine_pids
from tests.soak.wall import WallClock
from tests.soak.work import ADAPTERS, MODEL

FREE, BATCH, LIMITED = "free-key-free", "batch-key-batch", "limited-key-limited"
MANAGER = "manager-key-manager"
KEYS = [
    {"key": FREE, "name": "free", "weight": 2},
    {"key": BATCH, "name": "batch", "limits": {"max_class": "batch"}},
    {"key": LIMITED, "name": "limited", "limits": {"requests_per_minute": 120, "concurrent": 2}},
    {"key": MANAGER, "name": "manager", "scopes": ["management"]},
]
# Rows and blocks for a few answers only, so that they are preempted and prefixes evicted all the time.
MAX_WAITING = 256
ENGINE_TIMEOUT = 4.0  # seconds: above the pauses of "engine stopped for a while"
STREAM_IDLE_TIMEOUT = 8.0  # seconds: above the longest moment in which a client that reads is kept from it
SMALL = ("--max-waiting", str(MAX_WAITING), "--engine-timeout", str(ENGINE_TIMEOUT))
SMALL += ("--stream-idle-timeout", str(STREAM_IDLE_TIMEOUT))
SMALL += ("--max-num-seqs", "12", "--block-size", "16", "--num-blocks", "96", "--max-num-batched-tokens", "128")
SMALL += ("--max-loras", "2", "--lora-memory", "2000000")  # two of the adapters fit
DISK = 1 << 19  # bytes: a few blocks, full at once and ever again
MORE_BYTES = 96 << 20  # that a process may hold beyond its base line: freed memory that the allocator keeps
# At rest, besides engines: two renderers of chat templates, one checker of grammars, the tokenizer's first process, a
# copy. An engine has two more of a tokenizer, from its first grammar on.
CHILDREN, OF_ENGINE = 5, 2
TIMER = "Thread-"  # looks after surplus processes, while there are any
SURPLUS_SECONDS = 180.0  # within which further checkers and copies leave: they stay for a minute without work
REST_SECONDS = 60.0  # within which the gauges come back to zero
LEAK_SECONDS = 90.0  # within which what the processes hold comes back to the base line
# What must have happened in a soak that is worth its name.
EVENTS = ("preemptions", "prefix_hit_tokens", "prefix_evicted_blocks", "tier_hit_tokens", "tier_evicted")
EVENTS += ("answer_pauses", "http_stalled", "adapters_loads", "adapters_evictions")
GAUGES = (
    "http_requests_open",
    "requests_open",
    "answers_running",
    "answers_waiting",
    "answers_paused",
    "kv_usage_ratio",
)


# Every process names its threads for the kernel, which Python does by itself from 3.14 on.
NAMES = """
import sys, threading
def name_thread(frame, event, arg):
    sys.setprofile(None)
    with open("/proc/thread-self/comm", "w") as file:
        file.write(threading.current_thread().name[-15:])
threading.setprofile(name_thread)
"""


@dataclass(frozen=True)
class Facts:
    """What a process holds. threads: their names, but for those of pools, which start when they are first needed and
    stay; of a pool that was left behind they are here, since its successor's have the same names."""

    fds: int
    threads: tuple[str, ...]
    bytes: int
    children: int

    @classmethod
    def of(cls, pid: int) -> Facts:
        process = psutil.Process(pid)
        return cls(process.num_fds(), named_threads(pid), process.memory_info().rss, num_children(process))

    def excess(self, base: Facts) -> list[str]:
        """What is not as at the base line, and what descriptors and memory are above it."""
        found = [f"fds: {self.fds}, at most {base.fds}"] if self.fds > base.fds else []
        found += [f"children: {self.children}, not {base.children}"] if self.children != base.children else []
        now, then = Counter(self.threads), Counter(base.threads)
        found += [f"thread {name!r}: {now[name]}, not {then[name]}" for name in sorted((now - then) | (then - now))]
        most = base.bytes + MORE_BYTES
        return found + ([f"bytes: {self.bytes}, at most {most}"] if self.bytes > most else [])


def named_threads(pid: int) -> tuple[str, ...]:
    names = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has just ended
            names[(task / "comm").read_text().strip()] += 1
    pools = {name for name in names if re.search(r"_\d+$", name)}
    alone = Counter(re.sub(r"\d+$", "", name) for name in (names - Counter(pools)).elements())
    return tuple(sorted(alone.elements()))


def num_children(process: psutil.Process) -> int:
    """Processes under the server, but for those that an engine may have at rest."""
    engines = [child for child in process.children() if "kvasir.engine.worker" in child.cmdline()]
    own = sum(len(engine.children(recursive=True)) for engine in engines)
    return len(process.children(recursive=True)) - min(own, OF_ENGINE * len(engines))


class Server:
    """A running `kvasir serve`; `log` is what it prints. replicas: engines that it has at rest."""

    def __init__(self, base: str, process: subprocess.Popen, log: Path, wall: WallClock, replicas: int = 1):
        self.base = base
        self.process = process
        self.log = log
        self.wall = wall
        self.replicas = replicas
        self._stops = asyncio.Lock()  # one harm alone stops and resumes the engine
        self.kills = 0

    @property
    def most(self) -> int:
        """Engines that there may be at once."""
        return self.replicas + (self.replicas > 1)

    @property
    def engines(self) -> list[int]:
        return sorted(engine_pids(self.process))

    @property
    def engine(self) -> int:
        """The engine, or any replica."""
        found = self.engines
        assert found, "no engine process"
        return random.choice(found)

    async def kill_engine(self, pid: int | None = None) -> bool:
        """pid: of one of them. False when there was none to kill, since it was just being started."""
        try:
            os.kill(pid or self.engine, signal.SIGKILL)
        except (AssertionError, psutil.Error, ProcessLookupError):
            return False
        self.kills += 1
        return True

    async def freeze_engine(self, seconds: float) -> bool:
        """It stands still for ever; returns when another one has taken its place."""
        async with self._stops:
            try:
                process = psutil.Process(self.engine)
                process.suspend()
            except (AssertionError, psutil.Error):
                return False
            self.kills += 1
            try:
                await asyncio.to_thread(process.wait, seconds)
            except psutil.TimeoutExpired as error:
                process.kill()
                raise AssertionError(f"an engine that stood still for {seconds:g} seconds was not replaced") from error
            return True

    async def kill_starting(self) -> bool:
        """Kills the engine, and the next one while it starts."""
        before = self.engines
        if not await self.kill_engine():
            return False
        for _ in range(2000):
            if new := set(self.engines).difference(before):
                return await self.kill_engine(new.pop())
            await asyncio.sleep(0.005)
        return False

    async def stop_engine(self, seconds: float) -> bool:
        """It stands still for so long, as on a machine that is busy with something else."""
        async with self._stops:
            try:
                process = psutil.Process(self.engine)
                process.suspend()
                try:
                    await asyncio.sleep(seconds)
                    return process.status() == psutil.STATUS_STOPPED
                finally:
                    process.resume()
            except (AssertionError, psutil.Error):
                return False

    async def refuse_disk(self, seconds: float, patience: float) -> bool:
        """No file of the engine can grow for so long, as on a disk that is full, and then until that has met a write;
        whether it did with patience."""
        no_limit = resource.RLIM_INFINITY
        try:
            pid, before = self.engine, await self._disk_errors()
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, no_limit))
            try:
                await asyncio.sleep(seconds)
                for _ in range(int(patience / 0.5)):
                    if await self._disk_errors() > before:
                        return True
                    await asyncio.sleep(0.5)
                return False
            finally:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (no_limit, no_limit))
        except (AssertionError, psutil.Error, ProcessLookupError):
            return False

    async def _disk_errors(self) -> float:
        return (await self.metrics()).get("tier_saves_total.error", 0.0)

    async def metrics(self) -> dict[str, float]:
        """Sums over labels, by name and by name.outcome; without the engine's while it does not answer."""
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {FREE}", "connection": "close"}) as http:
            text = (await http.get(f"{self.base}/metrics", timeout=30)).text
        pattern = r"^kvasir_(\w+)(?:\{([^}]*)\})? ([0-9.e+-]+)$"
        found: dict[str, float] = {}
        for name, labels, value in re.findall(pattern, text, re.M):
            outcome = re.search(r'outcome="(\w+)"', labels)
            for key in (name, f"{name}.{outcome[1]}") if outcome else (name,):
                found[key] = found.get(key, 0.0) + float(value)
        return found

    async def warm(self) -> None:
        """Starts all that starts when it is first needed and then stays: renderers of chat templates, tokenizers."""
        text = "a long talk " * 10_000
        chat = {"model": MODEL, "messages": [{"role": "user", "content": text[:1000]}] * 20}
        long = {"model": MODEL, "input": text}
        headers, before = {"authorization": f"Bearer {FREE}", "connection": "close"}, ()
        async with httpx.AsyncClient(headers=headers, timeout=300) as http:
            for _ in range(200):
                asked = [http.post(f"{self.base}/v1/chat/completions", json=chat) for _ in range(12)]
                asked += [http.post(f"{self.base}/v1/embeddings", json=long) for _ in range(12)]
                statuses = {response.status_code for response in await asyncio.gather(*asked)}
                assert statuses == {400}, f"{statuses} for what is beyond the context"
                now = Facts.of(self.process.pid)
                if now.threads == before:
                    return await self._at_rest()
                before = now.threads
                await asyncio.sleep(0.5)
        raise AssertionError(f"the server does not come to steady threads: {now}")

    async def _at_rest(self) -> None:
        """Returns when the processes that were started for a moment of much work have left."""
        for _ in range(int(SURPLUS_SECONDS / 0.5)):
            now = Facts.of(self.process.pid)
            if now.children == CHILDREN + self.replicas and TIMER not in now.threads:
                return
            await asyncio.sleep(0.5)
        raise AssertionError(f"the server does not come to {CHILDREN + self.replicas} children: {now}")

    async def views(self) -> list[dict[str, Any]]:
        """Of the replicas of a fleet."""
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {FREE}", "connection": "close"}) as http:
            return (await http.get(f"{self.base}/fleet", timeout=30)).json()["replicas"]

    async def restore(self, seconds: float = REST_SECONDS) -> None:
        """Brings a fleet back to its replicas, all of them ready."""
        if self.replicas == 1:
            return
        headers, found = {"authorization": f"Bearer {MANAGER}", "connection": "close"}, []
        async with httpx.AsyncClient(headers=headers, timeout=seconds) as http:
            for _ in range(int(seconds / 0.1)):
                await http.post(f"{self.base}/fleet/scale", json={"replicas": self.replicas})
                found = [view["status"] for view in await self.views()]
                if found == ["ready"] * self.replicas:
                    return
                await asyncio.sleep(0.1)
        raise AssertionError(f"the replicas do not come back: {found}")

    async def rest(self, seconds: float = REST_SECONDS) -> list[str]:
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

    def seconds(self) -> tuple[float, float]:
        """Of the clock, and of processors: those that the server's processes and this one have used."""
        server = psutil.Process(self.process.pid)
        times = [p.cpu_times() for p in (psutil.Process(), server, *server.children(recursive=True))]
        return time.monotonic(), sum(t.user + t.system for t in times)

    async def facts(self) -> dict[str, Facts]:
        engines = {f"engine {i}": Facts.of(pid) for i, pid in enumerate(self.engines)}
        return {"server": Facts.of(self.process.pid), **engines}

    async def leaks(self, base: dict[str, Facts], seconds: float = LEAK_SECONDS) -> list[str]:
        """What is not back at the base line after so long: a second checker of grammars stays for a minute. Lowers the
        base line to what it finds."""
        await self.warm()
        found = await self.rest()
        if found:
            return found
        for _ in range(int(seconds / 0.25)):
            now = await self.facts()
            found = [f"{who} {what}" for who in base for what in now[who].excess(base[who])]
            if (held := self._disk_bytes()) > DISK * self.most:
                found.append(f"disk tier {held} bytes, at most {DISK * self.most}")
            if not found:
                break
            await asyncio.sleep(0.25)
        # A connection of the base line's own questions may have been open still.
        base |= {who: replace(base[who], fds=min(base[who].fds, now[who].fds)) for who in base}
        return found

    def _disk_bytes(self) -> int:
        """Of all files in the disk tier's folder, whatever they are called."""
        return sum(f.stat().st_size for f in (self.log.parent / "tier").rglob("*") if f.is_file())

    def complaints(self) -> list[str]:
        """Lines of the log that no fault of ours explains: deaths by anything but SIGKILL, tracebacks."""
        lines = self.log.read_text(errors="replace").splitlines()
        repeated = "; next attempt in"  # repeats the line before it
        deaths = [x for x in lines if "the engine process exited with status" in x and repeated not in x]
        found = [line for line in deaths if not re.search(r"status -9\b", line)]  # ours may also hit one that starts
        if len(deaths) > self.kills:
            found.append(f"{len(deaths)} deaths of the engine, {self.kills} by the soak")
        return found + [line for line in lines if re.match(r"Traceback|AssertionError|\w*Warning", line)]


@asynccontextmanager
async def running(folder: Path, plant: str = "", replicas: int = 1) -> AsyncIterator[Server]:
    """A server with some keys, adapters and little memory. plant: code that each of its processes runs first. replicas:
    of a fleet, which may have one more at times; 1 for a single engine.

    At the end it is asked to stop and must do so with status 0."""
    keys, log = folder / "keys.json", folder / "server.log"
    keys.write_text(json.dumps(KEYS))
    keys.chmod(0o600)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "kvasir.cli", "serve", MODEL, "--port", str(port), "--keys", str(keys), *SMALL]
    command += ["--lora-dir", str(folder / "adapters"), *(f"--lora={name}={path}" for name, path in adapters(folder))]
    most = replicas + (replicas > 1)
    command += ["--cache-dir", str(folder / "tier"), "--cache-disk", str(DISK * most), "--cache-write-share", "1"]
    command += ["--replicas", str(replicas), "--max-replicas", str(most)] if replicas > 1 else []
    (folder / "plant").mkdir()
    (folder / "plant" / "sitecustomize.py").write_text(NAMES + plant)
    wall = WallClock(folder)
    env = {
        **os.environ,
        **wall.environment,
        "PYTHONPATH": os.pathsep.join((str(folder / "plant"), str(SRC))),
        "PYTHONUNBUFFERED": "1",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
    server = Server(f"http://127.0.0.1:{port}", process, log, wall, replicas)
    try:
        await _healthy(server)
        yield server
        process.send_signal(signal.SIGTERM)
        status = await asyncio.to_thread(process.wait, 60)
        assert status in (0, -signal.SIGTERM), f"the server ended with status {status}"
    finally:
        process.kill()
        process.wait()


def adapters(folder: Path) -> Iterator[tuple[str, Path]]:
    """Random adapters by name, in a folder of their own."""
    for name in ADAPTERS:
        yield name, Path(shutil.copytree(on_linears(MODEL, f"soak {name}"), folder / "adapters" / name))


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
