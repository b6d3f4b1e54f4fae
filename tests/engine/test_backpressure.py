"""Readers that do not read: their requests pause, do not affect others, and resume with the same tokens."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import aclosing
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvasir.engine import streams
from kvasir.engine.core import EngineCore
from kvasir.engine.fake import FakeEngine
from kvasir.engine.inproc import InProcessEngine
from kvasir.engine.journal import Journal, RequestStage
from kvasir.engine.streams import Streams, entries
from kvasir.engine.subprocess import ProcessEngine
from kvasir.engine.wire import AHEAD
from kvasir.runner.fake import FakeRunner
from kvasir.sched.scheduler import Scheduler
from kvasir.types import Delta, FinishReason, TokenLogprob
from tests.engine.hosting import Hosted
from tests.sched.drive import by_hand, request

FULL, LOW = 200, 50  # in place of those that servers have
LENGTH = 1000
OPTIONS = {"max_model_len": LENGTH, "num_blocks": 300, "max_rows": 4, "step_seconds": 0.0005}
MOST = 600  # entries that may still come when a request is asked to pause, on a busy machine
BODIES = {
    "inproc": lambda **o: FakeEngine(**OPTIONS, **o),
    "process": lambda **o: ProcessEngine(fake=OPTIONS | o),
    "remote": lambda **o: Hosted(FakeEngine(**OPTIONS, **o)),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(streams, "FULL", FULL)
    monkeypatch.setattr(streams, "LOW", LOW)


@pytest.fixture(params=BODIES)
async def engine(request):
    engine = BODIES[request.param]()
    await engine.start()
    yield engine
    await engine.stop()


async def until(condition, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.01)


async def paused(engine, answers: int) -> None:
    async def all_are() -> bool:
        stats = await engine.stats()
        return stats.paused == answers and stats.running == stats.waiting == 0

    await until(all_are)


def long(id: str, n: int = 1, **params):
    return request(id, [1, 2, 3], **{"max_tokens": 900, "n": n, "seed": 5, "ignore_eos": True} | params)


def unread(stats, got: dict[int, list[int]]) -> int:
    """Entries that wait for the reader, two for each token."""
    return 2 * (stats.generated_tokens - sum(map(len, got.values())))


async def test_the_queue_of_a_slow_reader_is_bounded_and_others_continue(engine):
    asked = long("slow", n=2)
    async with aclosing(engine.submit(asked)) as stream:
        got = {0: [], 1: []}
        first = await anext(stream)
        got[first.index] += first.token_ids
        await paused(engine, 2)
        stats = await engine.stats()
        steps = stats.steps
        assert FULL <= unread(stats, got) <= FULL + MOST
        quick = [d async for d in engine.submit(request("quick", [7, 8], max_tokens=30, seed=0))]
        expected = by_hand(request("", [7, 8], max_tokens=30), 256, 512)
        assert [[token for d in quick for token in d.token_ids]] == expected
        assert (await engine.stats()).steps <= steps + 40, "what is paused is computed"
        most = 0
        async for delta in stream:
            got[delta.index] += delta.token_ids
            if len(got[0]) % 20 == 0:
                most = max(most, unread(await engine.stats(), got) - 2 * len(quick))
    assert list(got.values()) == by_hand(asked, 256, LENGTH)
    assert most <= FULL + MOST and (await engine.stats()).pauses >= 2
    await engine.check()


async def test_a_client_that_disconnects_while_paused_leaks_nothing(engine):
    stream = engine.submit(long("slow"))
    await anext(stream)
    await paused(engine, 1)
    await stream.aclose()

    async def empty() -> bool:
        stats = await engine.stats()
        return (stats.paused, stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0, 0)

    await until(empty)
    await engine.check()


async def test_a_deadline_ends_a_paused_request_in_an_idle_engine(engine, monkeypatch):
    if isinstance(engine, Hosted):
        pytest.skip("its last delta waits in the host until the reader reads on")
    monkeypatch.setattr(streams, "LOW", -1)  # reading does not resume it: the engine must wake up by itself
    asked = replace(long("slow"), deadline=2.0)
    async with aclosing(engine.submit(asked)) as stream:
        await anext(stream)
        await paused(engine, 1)
        async with asyncio.timeout(60):
            last = [d async for d in stream][-1]
    assert last.finish_reason is FinishReason.TIMEOUT and (await engine.stats()).paused == 0


async def test_a_paused_answer_keeps_its_tokens_when_the_engine_dies():
    engine = BODIES["process"]()
    await engine.start()
    try:
        asked = long("slow")
        async with aclosing(engine.submit(asked)) as stream:
            got = list((await anext(stream)).token_ids)
            await paused(engine, 1)
            os.kill(engine.pid, signal.SIGKILL)

            async def again() -> bool:
                return engine.restarts == 1

            await until(again)
            quick = [d async for d in engine.submit(request("quick", [7, 8], max_tokens=30, seed=0))]
            assert quick[-1].finish_reason is FinishReason.LENGTH, "a paused request keeps others waiting"
            assert (await engine.stats()).paused == 0, "it waits on this side"
            async for delta in stream:
                got += delta.token_ids
        assert [got] == by_hand(asked, 256, LENGTH)
        await engine.check()
    finally:
        await engine.stop()


async def test_an_engine_with_only_paused_requests_has_no_work():
    cores: list[EngineCore] = []

    def build() -> EngineCore:
        fake = FakeRunner(**OPTIONS)
        cores.append(EngineCore(fake, Scheduler(fake.capacity)))
        return cores[0]

    engine = InProcessEngine(build)
    await engine.start()
    try:
        async with aclosing(engine.submit(long("slow"))) as stream:
            await anext(stream)
            await paused(engine, 1)

            async def rests() -> bool:  # once the step in progress has ended
                return not cores[0].has_work()

            await until(rests)
            assert await engine.alive()
    finally:
        await engine.stop()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 3)), max_size=60))
@example([(True, 4, 3)] * 4 + [(False, 0, 0)] * 4)
def test_a_queue_pauses_when_full_and_resumes_when_low(moves):
    """Whatever comes and is read: it is paused from FULL on, until LOW."""

    async def run() -> None:
        reported: list[bool] = []
        queues = Streams(lambda id, whether: reported.append(whether))
        stream = queues.run(long("a"), lambda r: None, lambda id: None)
        queues_of = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        entry = TokenLogprob(1, -1.0, 1, tuple((i, -1.0) for i in range(20)))
        queues.deliver([Delta("a", 0, (1,))])
        await queues_of
        level, state, count = 0, False, 0
        for arrives, tokens, logprobs in moves:
            if arrives:
                delta = Delta("a", 0, (1,) * tokens * 10, (entry,) * logprobs)
                assert entries(delta) == 1 + 10 * tokens + 21 * logprobs
                queues.deliver([delta])
                count += 1
                level += entries(delta)
                state = state or level >= FULL
            elif count:
                level -= entries(await anext(stream))
                count -= 1
                state = state and level > LOW
            assert queues.unread["a"] == level
            assert (reported[-1] if reported else False) is state
        await stream.aclose()

    asyncio.run(run())


def test_the_journal_resends_a_paused_request_when_it_resumes():
    journal = Journal()
    for id in ("poor", "slow", "next"):
        journal.add(request(id, [1]))
    assert [r.id for r in journal.to_send()] == ["poor", "slow", "next"]
    journal.reached(["poor", "slow"], RequestStage.JOINED)
    journal.pause("slow", True)
    assert journal.death() == []
    assert journal.entries["slow"].deaths == 0, "what computes nothing kills nothing"
    assert [r.id for r in journal.to_send()] == ["poor", "next"]
    journal.pause("slow", False)
    assert [r.id for r in journal.to_send()] == ["slow"]


async def test_an_engine_waits_for_a_slow_event_loop():
    """In one process nothing else holds it back; what the loop has not taken stays bounded."""
    engine = FakeEngine(**OPTIONS | {"step_seconds": 0.0})
    await engine.start()
    try:
        async with aclosing(engine.submit(long("r"))) as stream:
            await anext(stream)
            steps = (await engine.stats()).steps
            time.sleep(0.5)  # the loop is busy elsewhere
            assert (await engine.stats()).steps - steps <= AHEAD + 50
    finally:
        await engine.stop()
