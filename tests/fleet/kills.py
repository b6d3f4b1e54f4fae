"""Kills replicas of real servers again and again under streams of four dialects: `python -m tests.fleet.kills`.

Each round starts streams, kills a replica in some phase of them, and compares what every client got with the answer
when nothing was killed. Prints a table; the exit status is 1 if a stream broke or differs. A kill counts if the replica
had requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter, deque
from pathlib import Path
from statistics import median
from threading import Thread

import httpx

from tests.e2e.server import serving
from tests.fleet.test_serve import ASKED, comparable, said

FLAGS = (
    *("--max-model-len", "1024", "--num-blocks", "96", "--max-num-seqs", "4", "--max-num-batched-tokens", "32"),
    *("--no-overlap", "--engine-timeout", "1"),
)
# Options of a server, and the phases of streams in which its replicas are killed.
SERVERS = (
    (("--replicas", "3"), ("queued", "prefill", "stream", "drain")),
    (("--prefill-replicas", "1", "--decode-replicas", "2"), ("hand-over",)),
)
PHASES = tuple(phase for _, phases in SERVERS for phase in phases)
LONG = "The quick brown fox jumps over the lazy dog. " * 40
TEXTS = 8  # long ones: more than a prefix cache keeps here, so that most are computed
STILL = 5.0  # seconds for which no process may be stopped by the machine's other users, where a stream may break
TOKENS = 200  # of most answers
STOPPED = 5  # one of so many is stopped instead of killed

Plain = dict[tuple[str, int], list]


class Kills:
    """wrong: a line for each stream that broke or differs. hits: kills of replicas that had requests. disturbed:
    streams that broke when the machine stood still, whose clients or servers ran out of time."""

    def __init__(self) -> None:
        self.kills: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        self.stopped: Counter[str] = Counter()
        self.streams: Counter[str] = Counter()
        self.disturbed = 0
        self.wrong: list[tuple[str, str]] = []
        self.pauses: list[float] = []  # seconds: the longest of each stream

    def rows(self) -> list[tuple]:
        wrong = Counter(phase for phase, _ in self.wrong)
        return [(p, self.kills[p], self.hits[p], self.stopped[p], self.streams[p], wrong[p]) for p in PHASES]

    def table(self) -> str:
        titles = ("phase", "kills", "of replicas with requests", "by SIGSTOP", "streams", "broken or wrong")
        sums = ("all", *(sum(column) for column in list(zip(*self.rows(), strict=True))[1:]))
        lines = ["| " + " | ".join(map(str, row)) + " |" for row in (titles, *self.rows(), sums)]
        return "\n".join((lines[0], "|---" * len(titles) + "|", *lines[1:]))

    def summary(self) -> str:
        pauses = sorted(self.pauses)
        return (
            f"longest silence of a stream: median {median(pauses):.2f} s, "
            f"99 % {pauses[len(pauses) * 99 // 100]:.2f} s, most {pauses[-1]:.2f} s"
            + (f"; {self.disturbed} broke while the machine stood still" if self.disturbed else "")
        )


class Client:
    """Rounds at one server."""

    def __init__(self, base: str, http: httpx.AsyncClient, rng: random.Random, found: Kills):
        self.base, self.http, self.rng, self.found = base, http, rng, found
        self.plain: Plain = {}
        self.still = 0.0  # the longest time for which this process did not run, in this round

    async def watch(self) -> None:
        """Notices when the machine stands still."""
        while True:
            begun = time.monotonic()
            await asyncio.sleep(0.1)
            self.still = max(self.still, time.monotonic() - begun)

    async def streamed(self, path: str, text: int, begun: asyncio.Event | None = None) -> tuple[list, float]:
        """What a stream gave, and its longest silence in seconds. text: the number of a long prompt, or 0."""
        found, last, silence = [], time.monotonic(), 0.0
        async with self.http.stream("POST", self.base + path, json=body_of(path, text), timeout=600) as response:
            if response.status_code != 200:
                raise AssertionError(f"{response.status_code}: {(await response.aread())[:300]!r}")
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data.startswith("{"):
                    event = json.loads(data)
                    if "error" in event:
                        raise AssertionError(f"an error event: {data[:300]}")
                    found += said(event)
                    now = time.monotonic()
                    silence, last = max(silence, now - last), now
                    if begun:
                        begun.set()
        return comparable(found), silence

    async def all_plain(self, texts: int = TEXTS) -> Plain:
        """Every answer while nothing is killed. texts: long prompts."""
        return {(path, text): (await self.streamed(path, text))[0] for path in ASKED for text in range(texts + 1)}

    async def views(self) -> list[dict]:
        return (await self.http.get(f"{self.base}/fleet", timeout=60)).json()["replicas"]

    async def ready(self, least: int) -> list[dict]:
        """The replicas that are ready, once there are as many."""
        for _ in range(2400):
            found = [r for r in await self.views() if r["status"] == "ready" and r["pid"]]
            if len(found) >= least:
                return found
            await asyncio.sleep(0.05)
        raise AssertionError("the replicas do not come back")

    async def round(self, phase: str, stop: bool) -> None:
        long = phase in ("prefill", "hand-over")
        asked = [(path, self.rng.randint(1, TEXTS) if long else 0) for path in ASKED for _ in range(copies(phase))]
        begun = [asyncio.Event() for _ in asked]
        ready = await self.ready(3 if phase == "hand-over" else 2)
        self.still = 0.0
        tasks = [asyncio.create_task(self.streamed(*a, b)) for a, b in zip(asked, begun, strict=True)]
        await self.reached(phase, begun)
        victim, restart = self.rng.choice(ready), None
        if phase == "drain":
            url = f"{self.base}/fleet/replicas/{victim['index']}/restart"
            restart = asyncio.create_task(self.http.post(url, json={"grace": 30}, timeout=300))
            await asyncio.sleep(self.rng.uniform(0.0, 0.1))
        killed = kill(victim["pid"], signal.SIGSTOP if stop else signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        if restart:
            answer = await restart
            assert answer.status_code == 200, answer.text
        if killed:
            self.found.kills[phase] += 1
            self.found.stopped[phase] += stop
            now = next(r for r in await self.views() if r["index"] == victim["index"])
            self.found.hits[phase] += now["lost"] + now["moved"] > victim["lost"] + victim["moved"]
        for one, result in zip(asked, results, strict=True):
            self.judge(phase, one, result)

    async def reached(self, phase: str, begun: list[asyncio.Event]) -> None:
        """Returns at some moment of the phase."""
        if phase in ("stream", "drain"):
            await first(begun)
        if phase == "hand-over" and self.rng.random() < 0.7:  # else while the prompt's blocks are sent
            await first(begun)
            return await asyncio.sleep(self.rng.uniform(0.0, 0.03))
        await asyncio.sleep(self.rng.uniform(0.0, 0.15))

    def judge(self, phase: str, asked: tuple[str, int], result: tuple[list, float] | BaseException) -> None:
        self.found.streams[phase] += 1
        path, plain = asked[0], self.plain[asked]
        if isinstance(result, BaseException) and self.still > STILL:
            self.found.disturbed += 1
        elif isinstance(result, BaseException):
            self.say_wrong(phase, f"{path}: broken: {type(result).__name__}: {result}")
        elif result[0] != plain:
            self.say_wrong(phase, f"{path}: another answer {difference(result[0], plain)}")
        else:
            self.found.pauses.append(result[1])

    def say_wrong(self, phase: str, line: str) -> None:
        print(f"WRONG {phase}: {line}", flush=True)
        self.found.wrong.append((phase, line))


async def first(events: list[asyncio.Event]) -> None:
    """Returns when one of them has come."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, timeout=30, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def body_of(path: str, text: int) -> dict:
    body = ASKED[path] | {"model": "kvasir-mini", "stream": True}
    if text and "prompt" in body:
        body["prompt"] = f"{text}. {LONG}"
    elif text:
        body["messages"] = [{"role": "user", "content": f"{text}. {LONG}"}]
    if path.startswith("/v1/c"):
        return body | {"ignore_eos": True, "max_tokens": TOKENS}
    return body | ({"options": body["options"] | {"num_predict": TOKENS}} if "options" in body else {})


def difference(got: list, plain: list) -> str:
    """Where two answers differ; of ids if they have some, else of texts."""
    if any(isinstance(part, tuple) and isinstance(part[1], int) for part in plain):
        got, plain = ([part for part in parts if isinstance(part[1], int)] for parts in (got, plain))
    at = next((i for i, (a, b) in enumerate(zip(got, plain, strict=False)) if a != b), min(len(got), len(plain)))
    here = slice(max(0, at - 4), at + 12)
    return f"from part {at} on: {got[here]} instead of {plain[here]} ({len(got)} parts instead of {len(plain)})"


def copies(phase: str) -> int:
    """Streams of each dialect: more than there are rows, or as many."""
    return 6 if phase == "queued" else 2


def kill(pid: int, kind: signal.Signals) -> bool:
    """False where the process was gone."""
    try:
        os.kill(pid, kind)
    except ProcessLookupError:
        return False
    return True


async def run(base: str, phases: tuple[str, ...], least: int, until: float, rng: random.Random, found: Kills) -> None:
    """Kills in these phases until each has so many that met requests, or the time is over."""
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=200)) as http:
        client = Client(base, http, rng, found)
        client.plain = await client.all_plain()
        watching = asyncio.create_task(client.watch())
        turn = 0
        while todo := [p for p in phases if found.hits[p] < least]:
            if time.monotonic() > until:
                break
            for phase in todo:
                await client.round(phase, stop=turn % STOPPED == STOPPED - 1)
            turn += 1
            print(f"{dict(found.hits)}, {found.streams.total()} streams, {len(found.wrong)} wrong", flush=True)
        watching.cancel()
        await client.ready(3)
        assert await client.all_plain() == client.plain, "other answers after all kills"
        left = [r for r in await client.views() if r["open"]]
        assert not left, f"open choices in the end: {left}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="of replicas with requests, in equal parts")
    parser.add_argument("--seconds", type=float, default=3600.0, help="ends earlier than that many kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--phase", choices=PHASES, action="append", help="only this one; repeatable")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    given = parser.parse_args()
    chosen = given.phase or PHASES
    found, begun = Kills(), time.monotonic()
    for options, phases in SERVERS:
        if mine := tuple(p for p in phases if p in chosen):
            with serving("kvasir-mini", *options, *FLAGS) as (base, process):
                lines: deque[str] = deque(maxlen=200)  # a full pipe would stop the server
                Thread(target=lambda lines=lines: lines.extend(process.stdout or ()), daemon=True).start()
                until = begun + given.seconds
                least = -(-given.kills // len(chosen))
                try:
                    asyncio.run(run(base, mine, least, until, random.Random(given.seed), found))
                except BaseException:
                    print("".join(lines))
                    raise
    print(found.table(), found.summary(), sep="\n")
    if given.out:
        names = ("phase", "kills", "hits", "stopped", "streams", "wrong")
        rows = [dict(zip(names, row, strict=True)) for row in found.rows()]
        pauses = [round(p, 3) for p in sorted(found.pauses)]
        result = {"seconds": round(time.monotonic() - begun), "phases": rows, "pauses": pauses, "wrong": found.wrong}
        given.out.write_text(json.dumps(result) + "\n")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
