"""Kills replicas of a real server again and again under streams of four dialects: `python -m tests.fleet.kills`.

Each round starts streams, kills a replica in some phase of them, and compares what every client got with the answer
when nothing was killed. Prints a table; the exit status is 1 if a stream broke or differs.
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
from statistics import median
from threading import Thread

import httpx

from tests.e2e.server import serving
from tests.fleet.test_serve import ASKED, comparable, said

PHASES = ("queued", "prefill", "stream", "drain")
LONG = "The quick brown fox jumps over the lazy dog. " * 40
FLAGS = (
    *("--max-model-len", "1024", "--num-blocks", "96", "--max-num-seqs", "4", "--max-num-batched-tokens", "32"),
    *("--no-overlap", "--engine-timeout", "1"),
)


class Kills:
    def __init__(self, base: str, http: httpx.AsyncClient, rng: random.Random):
        self.base, self.http, self.rng = base, http, rng
        self.killed: Counter[str] = Counter()
        self.streams: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.pauses: list[float] = []  # seconds: the longest of each stream that lost its replica's round

    async def streamed(self, path: str, long: bool, begun: asyncio.Event | None = None) -> tuple[list, float]:
        """What a stream gave, and its longest silence in seconds."""
        body = ASKED[path] | {"model": "kvasir-mini", "stream": True}
        if long and "prompt" in body:
            body["prompt"] = LONG
        if path == "/v1/completions":
            body["ignore_eos"] = True
        found, last, silence = [], time.monotonic(), 0.0
        async with self.http.stream("POST", self.base + path, json=body, timeout=120) as response:
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

    async def round(self, phase: str, plain: dict, stop: bool) -> None:
        long = phase == "prefill"
        paths = [path for path in ASKED for _ in range(6 if phase == "queued" else 2)]
        begun = [asyncio.Event() for _ in paths]
        ready = await self.ready(2)
        tasks = [asyncio.create_task(self.streamed(p, long, b)) for p, b in zip(paths, begun, strict=True)]
        if phase in ("stream", "drain"):
            await asyncio.wait([asyncio.ensure_future(b.wait()) for b in begun[:4]], timeout=30)
        await asyncio.sleep(self.rng.uniform(0.0, 0.15))
        victim, restart = self.rng.choice(ready), None
        if phase == "drain":
            url = f"{self.base}/fleet/replicas/{victim['index']}/restart"
            restart = asyncio.create_task(self.http.post(url, json={"grace": 30}, timeout=300))
            await asyncio.sleep(self.rng.uniform(0.0, 0.1))
        try:
            os.kill(victim["pid"], signal.SIGSTOP if stop else signal.SIGKILL)
            self.killed[f"{phase}{', stopped' if stop else ''}"] += 1
        except ProcessLookupError:
            pass
        for path, result in zip(paths, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
            self.streams[phase] += 1
            if isinstance(result, BaseException):
                self.wrong.append(f"{phase} {path}: broken: {type(result).__name__}: {result}")
            elif result[0] != plain[path, long]:
                self.wrong.append(f"{phase} {path}: another answer")
            else:
                self.pauses.append(result[1])
        if restart:
            answer = await restart
            assert answer.status_code == 200, answer.text


async def run(base: str, kills: int, seed: int, seconds: float) -> Kills:
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(limits=limits) as http:
        work = Kills(base, http, random.Random(seed))
        plain = {(path, long): (await work.streamed(path, long))[0] for path in ASKED for long in (False, True)}
        end = time.monotonic() + seconds
        while work.killed.total() < kills and time.monotonic() < end:
            count = work.killed.total()
            await work.round(PHASES[count % 4], plain, stop=count % 20 == 19)
            if work.killed.total() % 10 == 0:
                print(
                    f"{work.killed.total()} kills, {work.streams.total()} streams, {len(work.wrong)} wrong", flush=True
                )
        await work.ready(3)
        again = {(path, long): (await work.streamed(path, long))[0] for path in ASKED for long in (False, True)}
        assert again == plain, "other answers after all kills"
        views = await work.views()
        left = [r for r in views if r["open"]]
        assert not left, f"open choices in the end: {left}"
        print(json.dumps(views, indent=1))
        return work


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=3600.0, help="ends earlier than that many kills")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with serving("kvasir-mini", "--replicas", "3", *FLAGS) as (base, process):
        lines: deque[str] = deque(maxlen=200)  # a full pipe would stop the server
        Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True).start()
        try:
            work = asyncio.run(run(base, given.kills, given.seed, given.seconds))
        except BaseException:
            print("".join(lines))
            raise
    for phase, count in sorted(work.killed.items()):
        print(f"{phase:20} {count:4} kills")
    pauses = sorted(work.pauses)
    print(f"{work.streams.total()} streams, {len(work.wrong)} broken or with another answer")
    print(f"longest silence of a stream: median {median(pauses):.2f} s, 99 % {pauses[len(pauses) * 99 // 100]:.2f} s")
    print("\n".join(work.wrong[:20]))
    return 1 if work.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
