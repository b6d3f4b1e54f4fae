"""Resets of the prefix cache: what is forgotten, what stays, and that no token changes."""

from __future__ import annotations

import asyncio

import pytest

from kvasir.engine.fake import FakeEngine
from kvasir.engine.subprocess import ProcessEngine
from kvasir.errors import EngineDead
from kvasir.fleet.engine import FleetEngine
from tests.engine.hosting import Hosted
from tests.engine.test_process import FAKE, collect, expected, until
from tests.sched.drive import request

PROMPT = list(range(100))
MAKES = {
    "inproc": lambda: FakeEngine(**FAKE),
    "process": lambda: ProcessEngine(fake=FAKE),
    "remote": lambda: Hosted(FakeEngine(**FAKE)),
    "fleet": lambda: FleetEngine(lambda i: FakeEngine(**FAKE), 2, policy="round-robin"),
}


@pytest.fixture(params=MAKES)
async def engine(request):
    engine = MAKES[request.param]()
    await engine.start()
    yield engine
    await engine.stop()


async def cached(engine, name: str, prompt=PROMPT) -> int:
    """Computes a prompt; returns how many of its tokens were cached."""
    return max([delta.cached_tokens async for delta in engine.submit(request(name, prompt, max_tokens=2))])


async def test_every_prefix_is_forgotten(engine):
    for i in range(4):  # each replica gets two
        await cached(engine, f"first {i}")
    assert await cached(engine, "again") > 90
    assert await engine.reset_prefix_cache() > 0
    assert (await engine.stats()).blocks_cached == 0
    assert await cached(engine, "after") == 0
    await engine.check()
    assert await engine.reset_prefix_cache() > 0
    assert await engine.reset_prefix_cache() == 0


async def test_resets_under_load_change_no_token(engine):
    params = {"max_tokens": 30, "temperature": 1.0}
    asked = [request(f"r{i}", PROMPT[: 90 + i % 3], n=1 + i % 2, seed=i, **params) for i in range(12)]
    tasks = [asyncio.ensure_future(collect(engine, one)) for one in asked]
    resets = 0
    while not all(task.done() for task in tasks):
        await engine.reset_prefix_cache()
        if not isinstance(engine, FleetEngine):  # which checks that nothing is open
            await engine.check()
        resets += 1
        await asyncio.sleep(0.003)
    assert resets > 5
    assert [task.result() for task in tasks] == [expected(one) for one in asked]
    assert (await engine.stats()).blocks_used == 0


async def test_what_is_pinned_is_forgotten_too():
    engine = FakeEngine(**FAKE)
    await engine.start()
    try:
        pinned = request("pinned", PROMPT)
        object.__setattr__(pinned, "cache_ttl", 1000.0)
        await collect(engine, pinned)
        assert (await engine.stats()).blocks_used > 0
        await engine.reset_prefix_cache()
        assert (await engine.stats()).blocks_used == 0
        await engine.check()
    finally:
        await engine.stop()


@pytest.mark.parametrize("kind", ["inproc", "process", "remote"])
async def test_followers_learn_of_it_while_the_engine_is_idle(kind):
    engine, held = MAKES[kind](), set()
    await engine.start()

    def take(changes) -> None:
        for run in changes.runs:
            (held.update if run.stored else held.difference_update)(run.each())

    try:
        engine.follow_cache(take)
        await collect(engine, request("r", PROMPT))
        await until(lambda: held)
        await engine.reset_prefix_cache()
        await until(lambda: not held)
    finally:
        await engine.stop()


async def test_a_replica_that_does_not_answer_is_named():
    fleet = FleetEngine(lambda i: FakeEngine(**FAKE), 2)
    await fleet.start()
    try:
        await fleet.replicas[1].engine.stop()
        fleet.replicas[1].engine._info = None  # type: ignore[attr-defined]  # it starts again
        with pytest.raises(EngineDead, match="replica 1, which does not answer"):
            await fleet.reset_prefix_cache()
    finally:
        await fleet.stop()
