"""Clock jumps, as far as a process can be made to see them: a server in this process on a clock of our own."""

from __future__ import annotations

import asyncio
import random
import time

import httpx

from kvasir.engine.core import EngineCore
from kvasir.engine.front import Front
from kvasir.engine.inproc import InProcessEngine
from kvasir.runner.fake import FakeRunner
from kvasir.sched.scheduler import Scheduler
from kvasir.serve.app import create_app
from kvasir.serve.auth.keys import Key, KeyLimits
from kvasir.serve.hosting.catalogue import OneModel
from kvasir.serve.settings import ServeSettings
from tests.serve.fakes import VOCAB, byte_tokenizer, template
from tests.serve.running import assert_idle
from tests.soak.client import Tally

KEY = Key("clock-key-clock", "clock", limits=KeyLimits(requests_per_minute=1000, concurrent=64))
HEADERS = {"authorization": f"Bearer {KEY.secret}"}
JUMPS = (0.5, 5.0, 3600.0, 86400.0, -0.5, -3600.0)


class JumpingClock:
    """Seconds; `jump` moves them."""

    def __init__(self) -> None:
        self.shift = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.shift

    def nanoseconds(self) -> int:
        return int(self() * 1e9)


def make_front(clock: JumpingClock) -> Front:
    def build() -> EngineCore:
        fake = FakeRunner(vocab_size=VOCAB, num_blocks=40, max_rows=6, step_seconds=0.001)
        return EngineCore(fake, Scheduler(fake.capacity, clock=clock))

    return Front(InProcessEngine(build), byte_tokenizer(), template())


async def jump_clock(tally: Tally, seconds: float, rng: random.Random) -> bool:
    """Load while the clock jumps, also backwards. Answers without a deadline are their plain runs; one with a deadline
    is that or a 408; at the end nothing is left."""
    clock = JumpingClock()
    front = make_front(clock)
    await front.start()
    app = create_app(OneModel(front, ServeSettings(keys=(KEY,)), clock.nanoseconds))
    try:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost", headers=HEADERS, timeout=60
        ) as http:
            plain = [await _ask(http, seed, {}) for seed in range(6)]
            until = asyncio.get_running_loop().time() + seconds
            askers = [_load(http, plain, tally, random.Random(rng.random()), until) for _ in range(8)]
            await asyncio.gather(_jump(clock, tally, rng, until), *askers)
        clock.shift += 86400.0  # beyond every pin
        await assert_idle(front)
        return True
    finally:
        await front.stop()


async def _jump(clock: JumpingClock, tally: Tally, rng: random.Random, until: float) -> None:
    while asyncio.get_running_loop().time() < until:
        await asyncio.sleep(rng.uniform(0.01, 0.2))
        clock.shift += rng.choice(JUMPS)
        tally.injected["clock jumps"] += 1


async def _load(http: httpx.AsyncClient, plain: list[str], tally: Tally, rng: random.Random, until: float) -> None:
    """A deadline that passed before its time is the proof that the engine sees the jumps."""
    while asyncio.get_running_loop().time() < until:
        seed, deadline = rng.randrange(len(plain)), rng.random() < 0.4
        body = {"deadline": rng.uniform(0.5, 10)} if deadline else {"cache_ttl": 5} if rng.random() < 0.5 else {}
        begun = time.monotonic()
        found = await _ask(http, seed, body)
        tally.fired["clock jumps"] += found == "408" and time.monotonic() - begun < body["deadline"]
        assert found == plain[seed] or (deadline and found == "408"), f"{seed} {body}: {found!r}, plain {plain[seed]!r}"


async def _ask(http: httpx.AsyncClient, seed: int, body: dict) -> str:
    """The text of an answer, or "408". A key that is at its limit waits for the next jump."""
    body = {"prompt": "tick " * (seed + 3), "seed": seed, "max_tokens": 40, "n": 2} | body
    for _ in range(2000):
        response = await http.post("/v1/completions", json=body)
        if response.status_code != 429:
            break
        await asyncio.sleep(0.02)
    if response.status_code == 408:
        return "408"
    assert response.status_code == 200, f"{response.status_code}: {response.text}"
    return repr([c["text"] for c in response.json()["choices"]])
