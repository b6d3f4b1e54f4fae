"""The soak: plain answers first, then load and harm together, with moments of rest at which nothing may be left."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from tests.soak.client import Client, Tally, repeat
from tests.soak.clock import jump_clock
from tests.soak.fleet import FLEET_HARMS
from tests.soak.harm import HARMS, Harm, kill_engine
from tests.soak.server import EVENTS, LEAK_SECONDS, REST_SECONDS, SURPLUS_SECONDS, Facts, Server, running
from tests.soak.work import Question, questions

NUM_QUESTIONS = 40
ASKERS, HARMERS = 12, 4
KILL_SECONDS = 12.0  # the mean between two kills in a short soak; in a long one the count of deaths shall be forgotten
KILLS = 12
RESTS = SURPLUS_SECONDS + REST_SECONDS + LEAK_SECONDS  # seconds for a moment of rest: its stages report what is left
KILL = "engine killed"
JUMPS = "clock jumps"


Say = Callable[[str], None]


def patience(seconds: float) -> float:
    """Seconds after which an answer counts as lost, so that a soak of `seconds` has its verdict in time."""
    return min(300.0, max(60.0, seconds))


def slowness(begun: tuple[float, float], ended: tuple[float, float]) -> float:
    """How many times longer one thing after another takes here than it would on a machine that does nothing else.
    begun, ended: (seconds of the clock, seconds of processors)."""
    clock, used = (b - a for a, b in zip(begun, ended, strict=True))
    return max(1.0, clock / used)


def harms_of(tally: Tally) -> dict[str, Harm]:
    return HARMS | FLEET_HARMS if tally.replicas > 1 else HARMS


def unproven(tally: Tally) -> list[str]:
    """The harms of which no effect was seen yet."""
    return [name for name in harms_of(tally) if not tally.fired[name]]


def quiet(line: str) -> None:
    """Says nothing of the progress."""


async def soak(seconds: float, seed: int, plant: str = "", say: Say = quiet, replicas: int = 1) -> Tally:
    """Whatever was lost, leaked or wrong is in the tally's `wrong`; the load ends at the next moment of rest after it.
    plant: Python code that the server runs before its own, to prove that a fault is found. say: takes a line at each
    stage. replicas: of the server; 1 for a single engine."""
    rng, tally = random.Random(seed), Tally(patience(seconds), replicas=replicas)
    with tempfile.TemporaryDirectory(prefix="kvasir-soak-") as folder:
        try:
            async with running(Path(folder), plant, replicas) as server:
                await _soak(server, tally, rng, seconds, say)
                tally.wrong += server.complaints()
        except Exception as error:
            tally.wrong.append(f"{type(error).__name__}: {error}")
    await tally.count("clock", jump_clock(tally, min(20.0, seconds / 8), rng))
    tally.survived[JUMPS] = tally.injected[JUMPS] if tally.survived["clock"] else 0
    return tally


def progress(tally: Tally) -> str:
    """A few words on what has been done."""
    equal, done = tally.survived["of these, equal to the plain run"], sum(tally.injected.values())
    return f"{done} pieces of load and harm, {equal} answers equal to their plain runs, {len(tally.wrong)} wrong"


def idle(tally: Tally) -> list[str]:
    """The harms and the counters of which no effect was seen: a soak that is long enough must have all of them."""
    rest = [name for name in (KILL, JUMPS) if not tally.fired[name]]
    harms = [f"no effect of: {name}" for name in (*unproven(tally), *rest)]
    return harms + [f"counter {name} stayed at 0" for name in EVENTS if not tally.seen[name]]


async def _soak(server: Server, tally: Tally, rng: random.Random, seconds: float, say: Say) -> None:
    rests = max(2, min(3, int(seconds // 60)))
    part = seconds / (rests + 1)
    say(f"{NUM_QUESTIONS} questions, each alone")
    begun = server.seconds()
    plain = await _plain(server, tally, rng)
    tally.slowness = slowness(begun, server.seconds())
    tally.patience *= tally.slowness
    say(f"load without deaths for {part:.0f} seconds ({tally.slowness:.1f} times slower than alone)")
    # A first part without deaths warms up: pools of threads, pages of memory.
    await _busy(server, tally, rng, plain, part, 0.0)
    if tally.wrong:
        return
    say("rest")
    limit = RESTS + tally.patience
    base: dict[str, Facts] = {}
    await tally.count("warming up", _warmed(server, base), limit)
    while rests and not tally.wrong:
        rests -= 1
        say(f"load with deaths for {part:.0f} seconds, {rests} more to come; so far {progress(tally)}")
        await _busy(server, tally, rng, plain, part, max(KILL_SECONDS, seconds / KILLS), last=not rests)
        say(f"rest; so far {progress(tally)}")
        await tally.count("moments of rest", _rested(server, tally, base), limit)


def _http() -> httpx.AsyncClient:
    return httpx.AsyncClient(limits=httpx.Limits(max_connections=None, max_keepalive_connections=20))


async def _plain(server: Server, tally: Tally, rng: random.Random) -> list[tuple[Question, Any]]:
    """Questions, each with its answer when it is asked alone, whole, and past the cache."""
    async with _http() as http:
        c = Client(server, http, rng, tally, [])
        asked = questions(rng, NUM_QUESTIONS)
        return [(q, await c.post(q.route, q.body | {"no_cache": True})) for q in asked]


async def _warmed(server: Server, base: dict[str, Facts]) -> bool:
    """Fills the base line."""
    for settle in (None, server.warm):  # reports leaks before the long wait for processes that start on demand
        if settle:
            await settle()
        left = await server.rest()
        assert not left, f"left behind: {left}"
    base |= await server.facts()
    return True


async def _rested(server: Server, tally: Tally, base: dict[str, Facts]) -> bool:
    left = await server.leaks(base)
    assert not left, f"left behind: {left}"
    now = await server.metrics()
    for name in EVENTS:
        tally.seen[name] = max(tally.seen[name], int(now.get(f"{name}_total", 0)))
    return True


async def _restored(server: Server) -> bool:
    await server.restore()
    return True


async def _busy(
    server: Server,
    tally: Tally,
    rng: random.Random,
    plain: list[tuple[Question, Any]],
    seconds: float,
    mean: float,
    last: bool = False,
) -> None:
    """Load and harm for so long, and until each harm was done once; returns when all of it has ended, or something
    was wrong. mean: seconds between two kills; 0: none. last: a harm without an effect so far is done again."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    harms = harms_of(tally)
    names, weights = list(harms), [weight for _, weight in harms.values()]
    first = rng.sample(names, len(names))

    def goes_on() -> bool:
        if tally.wrong:
            return False
        again = last and bool(unproven(tally)) and loop.time() < until + tally.patience
        return loop.time() < until or bool(first) or again

    async with _http() as http:
        c = Client(server, http, rng, tally, plain)

        def ask() -> Awaitable[Any]:
            return tally.count("questions", c.answer())

        def harm() -> Awaitable[Any]:
            again = unproven(tally) if last and loop.time() > until else []
            name = first.pop() if first else rng.choice(again) if again else rng.choices(names, weights)[0]
            return tally.count(name, harms[name][0](c))

        def kill() -> Awaitable[Any]:
            return tally.count(KILL, kill_engine(c))

        work = [repeat(ask, goes_on, lambda: 0.0) for _ in range(ASKERS)]
        work += [repeat(harm, goes_on, lambda: rng.uniform(0, 0.5)) for _ in range(HARMERS)]
        if mean:
            await asyncio.sleep(rng.uniform(0, min(2.0, seconds / 2)))
            work.append(repeat(kill, goes_on, lambda: rng.expovariate(1 / mean)))
        await asyncio.gather(*work)
    if tally.replicas > 1 and not tally.wrong:
        await tally.count("replicas restored", _restored(server), RESTS)
