"""Replicas that die, in each phase of a request: every stream gets the tokens that it gets alone, once each."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace

import pytest

from kvasir.errors import EngineDead, InvalidRequest, QueueFull
from kvasir.types import FinishReason
from tests.engine.test_process import collect, expected, until
from tests.fleet.fleets import all_ready, at_both, kill, process, running
from tests.sched.drive import request

PHASES = {
    "queued": ({"max_rows": 1, "step_seconds": 0.004}, dict(max_tokens=20)),
    "prefill": ({"max_tokens_per_step": 8, "step_seconds": 0.004}, dict(max_tokens=4)),
    "stream": ({"step_seconds": 0.004}, dict(max_tokens=50)),
}


def asked(phase: str, count: int = 8) -> list:
    params = PHASES[phase][1]
    prompt = [3] * 120 if phase == "prefill" else []
    return [request(f"r{i}", [*prompt, i], n=1 + i % 2, seed=i, temperature=1.0, **params) for i in range(count)]


@pytest.mark.few(1)
@pytest.mark.parametrize("phase", PHASES)
async def test_requests_of_a_killed_replica_continue_on_another(phase):
    async with running(2, **PHASES[phase][0]) as engine:
        requests = asked(phase)
        tasks = [asyncio.create_task(collect(engine, r)) for r in requests]
        await at_both(engine)
        first = engine.replicas[0]
        kill(first)
        await until(lambda: first.counts.lost)
        assert engine.state.status == "ok" and await engine.alive(10)
        answers = await asyncio.wait_for(asyncio.gather(*tasks), 120)
        assert answers == [expected(r) for r in requests]
        assert not any(r.open for r in engine.replicas)


async def test_the_counters_of_a_killed_replica_stay_while_it_starts():
    async with running(2, step_seconds=0.004) as engine:
        await collect(engine, request("r0", [1], max_tokens=5))
        await collect(engine, request("r1", [2], max_tokens=5))
        await until(lambda: sum(v.generated_tokens for v in engine.views) == 10)
        busiest = max(engine.views, key=lambda view: view.generated_tokens)
        seen = []

        def restarts() -> bool:
            seen.append(engine.views[busiest.index])
            return seen[-1].restarts == 1 and seen[-1].status == "ready"

        kill(engine.replicas[busiest.index])
        await until(restarts)
        assert "starting" in {view.status for view in seen}
        assert {view.generated_tokens for view in seen} == {busiest.generated_tokens}


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
async def test_requests_of_a_hung_replica_continue_on_another(phase):
    async with running(2, hang_seconds=1.0, **PHASES[phase][0]) as engine:
        requests = asked(phase)
        tasks = [asyncio.create_task(collect(engine, r)) for r in requests]
        await at_both(engine)
        kill(engine.replicas[0], signal.SIGSTOP)
        assert await asyncio.wait_for(asyncio.gather(*tasks), 120) == [expected(r) for r in requests]
        await until(lambda: engine.replicas[0].restarts == 1)


async def test_health_and_statistics_do_not_wait_for_a_silent_replica(monkeypatch):
    monkeypatch.setattr("kvasir.fleet.members.ASK_SECONDS", 0.1)
    async with running(2, hang_seconds=1e6) as engine:
        await collect(engine, request("r0", [1], max_tokens=5))
        silent = engine.replicas[0]
        kill(silent, signal.SIGSTOP)
        assert await engine.alive(1e6)
        await until(lambda: silent.silent)
        monkeypatch.setattr("kvasir.fleet.members.ASK_SECONDS", 1e6)
        monkeypatch.setattr("kvasir.fleet.engine.ASK_SECONDS", 1e6)
        stats, seen = await engine.stats(), await engine.look()
        assert stats.generated_tokens == seen.stats.generated_tokens == 5
        assert [stats.replicas[name].ready for name in ("0", "1")] == [0, 1]
        monkeypatch.undo()
        kill(silent, signal.SIGCONT)


@pytest.mark.slow
async def test_both_replicas_die_and_streams_continue_once_one_is_back():
    async with running(2, step_seconds=0.004) as engine:
        requests = asked("stream")
        tasks = [asyncio.create_task(collect(engine, r)) for r in requests]
        await at_both(engine)
        for replica in engine.replicas:
            kill(replica)
        await until(lambda: engine.state.status != "ok")
        assert not await engine.alive()
        with pytest.raises(EngineDead):
            await engine.stats()
        new = asyncio.create_task(collect(engine, request("new", [9])))
        assert await asyncio.wait_for(asyncio.gather(*tasks), 120) == [expected(r) for r in requests]
        assert await new == expected(request("new", [9]))


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [2, 3])
async def test_a_poison_request_fails_and_leaves_a_replica_for_the_others(count):
    async with running(count, deadly_token=255, step_seconds=0.004) as engine:
        requests = [r for r in asked("stream", 12) if not any(255 in ids for ids in expected(r).values())]
        tasks = [asyncio.create_task(collect(engine, r)) for r in requests]
        await at_both(engine)
        with pytest.raises(EngineDead, match="twice"):
            await asyncio.wait_for(collect(engine, request("poison", [255, 1])), 120)
        assert await asyncio.wait_for(asyncio.gather(*tasks), 120) == [expected(r) for r in requests]
        await all_ready(engine)
        assert 2 <= sum(r.restarts for r in engine.replicas) <= 8
        if count == 3:
            assert min(r.restarts for r in engine.replicas) == 0, "the third is never touched"


async def test_a_slow_readers_stream_continues_when_it_is_read(monkeypatch):
    monkeypatch.setattr("kvasir.engine.streams.FULL", 20)
    monkeypatch.setattr("kvasir.engine.streams.LOW", 5)
    async with running(2, step_seconds=0.002) as engine:
        slow = request("slow", [1], max_tokens=120, n=2, temperature=1.0, seed=3)
        stream = engine.submit(slow)
        got: dict[int, list[int]] = {}
        for _ in range(3):
            delta = await anext(stream)
            got.setdefault(delta.index, []).extend(delta.token_ids)
        (home,) = (r for r in engine.replicas if r.open)
        await until(lambda: next(iter(process(home)._journal.entries.values())).paused)
        kill(home)
        await until(lambda: home.restarts)
        async for delta in stream:
            got.setdefault(delta.index, []).extend(delta.token_ids)
        assert got == expected(slow)


async def test_aborts_and_deadlines_hold_while_no_replica_is_there():
    async with running(1, step_seconds=0.004) as engine:
        one = request("one", [1], max_tokens=80, n=3)
        task = asyncio.create_task(collect(engine, one, got := {}))
        await until(lambda: got)
        kill(engine.replicas[0])
        await until(lambda: engine.replicas[0].status != "ready")
        await engine.abort("one", 1)
        late = replace(request("late", [1], n=2), deadline=0.05)
        assert [d.finish_reason async for d in engine.submit(late)] == [FinishReason.TIMEOUT] * 2
        gone = asyncio.create_task(collect(engine, request("gone", [2])))
        await asyncio.sleep(0.01)
        await engine.abort("gone")
        assert await gone == {0: []}
        answers, whole = await asyncio.wait_for(task, 120), expected(one)
        assert (answers[0], answers[2]) == (whole[0], whole[2]) and len(answers[1]) < 80


@pytest.mark.slow
async def test_a_stream_that_is_left_frees_all_that_it_holds():
    async with running(2, step_seconds=0.004) as engine:
        stream = engine.submit(request("a", [1, 2], max_tokens=400, n=3))
        await anext(stream)
        with pytest.raises(InvalidRequest, match="already in use"):
            await collect(engine, request("a", [3]))
        await stream.aclose()  # type: ignore[attr-defined]
        task = asyncio.create_task(collect(engine, request("b", [3], max_tokens=400)))
        await asyncio.sleep(0.02)
        task.cancel()
        await until(lambda: not any(r.open for r in engine.replicas))


@pytest.mark.slow
async def test_a_full_queue_is_refused_only_when_all_are_full():
    async with running(2, max_rows=1, step_seconds=0.01) as engine:
        for replica in engine.replicas:
            process(replica)._max_waiting = 1
        engine._max_waiting = 1
        for replica in engine.replicas:
            kill(replica)
        await until(lambda: not any(r.takes for r in engine.replicas))
        first = asyncio.create_task(collect(engine, request("first", [1])))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await collect(engine, request("second", [2]))
        assert await first == expected(request("first", [1]))


async def test_an_id_used_again_gets_no_tokens_of_the_time_before():
    """The client left, and the replica does not know it yet."""
    async with running(1, step_seconds=0.001) as engine:
        for turn in range(20):
            before = engine.submit(request("same", [1 + turn], max_tokens=100))
            await anext(before)
            await before.aclose()  # type: ignore[attr-defined]
            again = request("same", [100 + turn], max_tokens=5)
            assert await collect(engine, again) == expected(again)
