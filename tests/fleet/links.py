"""A server before replicas elsewhere, whose connections (TLS) go through relays that break them in every way, under
streams of four dialects: each client gets its own answer."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from threading import Thread
from typing import IO

import httpx
import psutil

from tests.e2e.server import SRC, engine_pids, serving
from tests.fleet.kills import FLAGS, Client, Kills, kill
from tests.fleet.relay import Relay
from tests.fleet.test_serve import ASKED
from tests.serve.http.test_tls import make
from tests.soak.client import Tally

REPLICAS, CLIENTS, TEXTS = 2, 6, 2
SMALL = tuple(flag for flag in FLAGS if flag != "--no-overlap")
Harms = Mapping[str, tuple[Callable[[], Awaitable[bool]], bool]]
LOST = 120.0  # seconds without a token, after which a stream counts as lost


class There:
    """`kvasir replica` in a process of its own, which can be killed and started again at its port."""

    def __init__(self, folder: Path, secret: tuple[str, ...]):
        self.command = (sys.executable, "-m", "kvasir.cli", "replica", "kvasir-mini")
        self._options = (*secret, *SMALL)
        self._env = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONUNBUFFERED": "1", "TMPDIR": str(folder)}
        self.port = 0
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [*self.command, "--port", str(self.port), *self._options]
        self.process = subprocess.Popen(
            command, env=self._env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self.process.stdout
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if found := re.search(r" at tls://[\d.]+:(\d+)", line):
                self.port = int(found[1])
                Thread(target=read_to_the_end, args=(self.process.stdout,), daemon=True).start()
                return
        raise AssertionError(f"the replica ended:\n{''.join(lines)}")

    def end(self) -> None:
        assert self.process
        self.process.terminate()
        assert self.process.wait(60) in (0, -signal.SIGTERM), "a replica did not stop"

    @property
    def engine(self) -> int:
        assert self.process
        return next(iter(engine_pids(self.process)), 0)


def read_to_the_end(stream: IO[str]) -> None:
    """Reads a pipe, which would stop its process once it is full, and closes it."""
    with stream:
        for _ in stream:
            pass


def keep_reading(stream: IO[str]) -> deque[str]:
    """The latest lines of a pipe that others close."""
    lines: deque[str] = deque(maxlen=300)
    Thread(target=lambda: lines.extend(stream), daemon=True).start()
    return lines


class Links:
    """What is done to the replicas and the connections to them. Each harm returns whether it had an effect."""

    def __init__(self, there: list[There], relays: list[Relay], rng: random.Random):
        self.there, self.relays, self.rng = there, relays, rng

    @property
    def relay(self) -> Relay:
        return self.rng.choice(self.relays)

    async def cut_all(self) -> bool:
        return any([await relay.cut() for relay in self.relays])

    async def kill_engine(self) -> bool:
        """The engine of a replica is gone; the connection stays."""
        return kill_any(self.rng.choice(self.there).engine, signal.SIGKILL)

    async def stop_engine(self) -> bool:
        """The engine of a replica stands still for a while, or until its host replaces it."""
        pid = self.rng.choice(self.there).engine
        stopped = kill_any(pid, signal.SIGSTOP)
        await asyncio.sleep(self.rng.uniform(0.5, 3.0))
        kill_any(pid, signal.SIGCONT)
        return stopped

    async def stop_host(self) -> bool:
        """The process that serves a replica stands still for a while."""
        there = self.rng.choice(self.there)
        assert there.process
        there.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(self.rng.uniform(1.0, 4.0))
        there.process.send_signal(signal.SIGCONT)
        return True

    async def kill_host(self) -> bool:
        """The process that serves a replica is gone, and comes back at the same address."""
        there = self.rng.choice(self.there)
        assert there.process
        there.process.kill()
        there.process.wait()
        await asyncio.to_thread(there.start)
        return True

    def pause(self) -> float:
        return self.rng.uniform(0.5, 4.0)

    def harms(self) -> Harms:
        found: dict[str, Callable[[], Awaitable[bool]]] = {
            "connection cut": lambda: self.relay.cut(),
            "all connections cut": self.cut_all,
            "half of a connection closed": lambda: self.relay.close_half(),
            "connection stalled": lambda: self.relay.stall(self.pause()),
            "connection slow": lambda: self.relay.slow(self.pause(), 0.05),
            "connections refused": lambda: self.relay.refuse(self.pause()),
            "bit inverted": lambda: self.relay.corrupt(),
            "byte lost": lambda: self.relay.lose(),
            "engine of a host killed": self.kill_engine,
            "engine of a host stopped": self.stop_engine,
            "host stopped": self.stop_host,
            "host killed": self.kill_host,
        }
        return {name: (harm, True) for name, harm in found.items()}


def kill_any(pid: int, kind: signal.Signals) -> bool:
    return bool(pid) and kill(pid, kind)


@asynccontextmanager
async def served(addresses: list[str], key: Path, cert: Path) -> AsyncIterator[tuple[str, int]]:
    """A server before replicas at these addresses: its base address and its process id."""
    flags = [flag for address in addresses for flag in ("--replica", f"tls://{address}")]
    opened = serving("kvasir-mini", *flags, "--replica-key", str(key), "--replica-ca", str(cert))
    base, process = await asyncio.to_thread(opened.__enter__)
    assert process.stdout
    lines = keep_reading(process.stdout)
    try:
        yield base, process.pid
    except BaseException:
        print("".join(lines))
        raise
    finally:
        await asyncio.to_thread(opened.__exit__, None, None, None)


def secrets_in(folder: Path, names: str) -> tuple[Path, Path, tuple[str, ...]]:
    """A key, a certificate for these names, and the options of a replica that has them."""
    pair, key = make(folder, "replicas", names=names), folder / "key"
    key.write_text("a key of sufficient length\n")
    key.chmod(0o600)
    return key, pair.cert, ("--replica-key", str(key), "--tls-cert", str(pair.cert), "--tls-key", str(pair.key))


class Load:
    """Clients who ask again and again. Each has an event that its tokens set."""

    def __init__(self, client: Client, tally: Tally):
        self.client, self.tally = client, tally
        self.events = [asyncio.Event() for _ in range(CLIENTS)]
        self.ends = False

    async def ask(self, event: asyncio.Event) -> None:
        rng = self.client.rng
        while not self.ends:
            asked = (rng.choice(list(ASKED)), rng.choice((0, rng.randint(1, TEXTS))))
            self.tally.injected["streams"] += 1
            try:
                result: tuple[list, float] | BaseException = await self.client.streamed(*asked, event)
            except Exception as error:
                result = error
            before = len(self.client.found.wrong)
            self.client.judge("links", asked, result)
            self.tally.survived["streams"] += len(self.client.found.wrong) == before
            event.set()

    async def progress(self) -> None:
        """Returns once each client got something: so no request meets as many harms as would make it a suspect."""
        for event in self.events:
            event.clear()
        try:
            await asyncio.wait_for(asyncio.gather(*(event.wait() for event in self.events)), LOST)
        except TimeoutError:
            raise AssertionError(f"lost: no token within {LOST:g} s") from None


async def broken(base: str, pid: int, tally: Tally, rng: random.Random, harms: Harms, seconds: float) -> None:
    """Load and harm for so long, and until each harm was done. Whatever was lost, leaked or wrong is in the tally.
    harms: each with whether it is done more than once. pid: of the server."""
    async with httpx.AsyncClient() as http:
        client = Client(base, http, rng, found := Kills())
        client.plain = await client.all_plain(TEXTS)
        load = Load(client, tally)
        asking = [asyncio.create_task(load.ask(event)) for event in load.events]
        await load.progress()
        most = psutil.Process(pid).num_fds()
        until, todo = time.monotonic() + seconds, rng.sample(list(harms), len(harms))
        often = [name for name, (_, more) in harms.items() if more]
        while (time.monotonic() < until or todo) and not (tally.wrong or found.wrong):
            harm = todo.pop() if todo else rng.choice(often)
            await tally.count(harm, harms[harm][0]())
            await tally.count("progress", true(load.progress()), 2 * LOST)
        load.ends = True
        await asyncio.gather(*asking)
        tally.wrong += [line for _, line in found.wrong]
        if not tally.wrong:
            await tally.count("moments of rest", true(rested(client, pid, most)))


async def break_links(seconds: float, seed: int) -> Tally:
    """Breaks connections to replicas, and what serves them."""
    rng, tally = random.Random(seed), Tally(LOST)
    with tempfile.TemporaryDirectory(prefix="kvasir-links-", dir="/tmp") as name:
        key, cert, secret = secrets_in(Path(name), "IP:127.0.0.1")
        async with AsyncExitStack() as stack:
            there, relays = [There(Path(name), secret) for _ in range(REPLICAS)], []
            for one in there:
                await asyncio.to_thread(one.start)
                stack.callback(one.end)
                relays.append(relay := Relay(one.port))
                await relay.start()
                stack.push_async_callback(relay.stop)
            addresses = [f"127.0.0.1:{relay.port}" for relay in relays]
            base, pid = await stack.enter_async_context(served(addresses, key, cert))
            await broken(base, pid, tally, rng, Links(there, relays, rng).harms(), seconds)
        tally.wrong += [f"left behind: {path}" for path in left_in(Path(name))]
    return tally


async def true(work: Awaitable[None]) -> bool:
    await work
    return True


async def rested(client: Client, pid: int, most: int) -> None:
    """Nothing is under way, and all answers are as before."""
    await client.ready(REPLICAS)
    assert await client.all_plain(TEXTS) == client.plain, "other answers in the end"
    left: list[str] = []
    for _ in range(300):
        left = [f"open choices: {r['open']}" for r in await client.views() if r["open"]]
        left += [f"blocks: {r['blocks_used']}" for r in await client.views() if r["blocks_used"]]
        fds = psutil.Process(pid).num_fds()
        left += [f"descriptors: {fds}, at most {most}"] if fds > most else []
        if not left:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"left behind: {left}")


def left_in(folder: Path) -> list[str]:
    """Sockets and folders of sockets."""
    return [path.name for path in folder.iterdir() if path.name.startswith("kvasir-engine-")]
