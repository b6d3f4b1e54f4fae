"""Replicas are replaced, added and taken away while they serve: streams go on elsewhere with the same tokens."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from kvasir.engine import wire
from kvasir.engine.subprocess import ProcessEngine
from kvasir.errors import ConfigError, EngineDead, InvalidRequest, KvasirError
from kvasir.fleet.engine import FleetEngine
from tests.engine.test_process import FAKE, collect, expected, until
from tests.fleet.fleets import at_both, fleet, kill, pid, process, running
from tests.sched.drive import request


def streams(count: int = 8) -> list:
    return [request(f"r{i}", [i], max_tokens=60, n=1 + i % 2, seed=i, temperature=1.0) for i in range(count)]


async def test_all_replicas_are_replaced_one_after_another_under_load():
    async with running(2, step_seconds=0.02) as engine:
        requests = streams()
        tasks = [asyncio.create_task(collect(engine, r)) for r in requests]
        await at_both(engine)
        pids = [pid(r) for r in engine.replicas]
        await engine.restart_all()
        assert not {pid(r) for r in engine.replicas} & set(pids)
        assert await asyncio.wait_for(asyncio.gather(*tasks), 120) == [expected(r) for r in requests]
        choices, moved = sum(r.params.n for r in requests), sum(r.counts.moved for r in engine.replicas)
        assert moved > 0
        stats = await engine.stats()
        # Above `choices` by those, up to two of each request, that ended in a replica just before they moved.
        assert choices <= stats.finished - stats.aborted <= choices + 2 * moved, "replaced replicas still count"
        assert [stats.replicas[i].restarts for i in "01"] == [1, 1]


async def test_a_choice_whose_end_is_on_its_way_when_it_moves_ends_in_two_replicas(monkeypatch):
    async with running(2, step_seconds=0.004) as engine:
        requests = streams()
        tasks = [asyncio.create_task(collect(engine, r)) for r in requests]
        await at_both(engine)
        home, on_the_way = engine.replicas[0], []
        handle = process(home)._handle

        def hold(event: wire.Event) -> None:
            on_the_way.append(event) if isinstance(event, wire.Deltas) else handle(event)

        monkeypatch.setattr(process(home), "_handle", hold)
        leaving = sum(len(entry.open) for entry in home.open.values())
        await until(lambda: home.stats.finished == leaving)
        monkeypatch.undo()
        await engine._move_all(home)
        for event in on_the_way:
            handle(event)
        assert await asyncio.wait_for(asyncio.gather(*tasks), 120) == [expected(r) for r in requests]
        stats = await engine.stats()
        assert (stats.finished, stats.aborted) == (sum(r.params.n for r in requests) + leaving, 0)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [EngineDead("no process"), OSError("no process")], ids=["expected", "unexpected"])
async def test_a_replica_that_could_not_start_is_started_again(fault):
    made = []

    class Failing(ProcessEngine):
        async def start(self) -> None:
            if len(made) == 3:
                raise fault
            await super().start()

    def make(index: int) -> ProcessEngine:
        made.append(index)
        return Failing(fake=FAKE, hands_over=True, patient=True)

    engine = FleetEngine(make, 2, most=3)
    await engine.start()
    try:
        with pytest.raises(type(fault)):
            await engine.restart_replica(1)
        await until(lambda: all(r.takes for r in engine.replicas))
        assert made == [0, 1, 1, 1]
        made.pop()
        made.pop()
        with pytest.raises(type(fault)):
            await engine.scale(3)
        assert [r.index for r in engine.replicas] == [0, 1]
        await engine.scale(3)
        assert [r.takes for r in engine.replicas] == [True] * 3
    finally:
        await engine.stop()


@pytest.mark.slow
async def test_a_replica_has_time_to_finish_what_it_has():
    async with running(2, step_seconds=0.004) as engine:
        requests = streams()
        tasks = [asyncio.create_task(collect(engine, r)) for r in requests]
        await at_both(engine)
        await engine.restart_replica(1, grace=60)
        assert await asyncio.wait_for(asyncio.gather(*tasks), 120) == [expected(r) for r in requests]
        assert engine.replicas[1].counts.moved == 0


@pytest.mark.slow
async def test_a_kill_during_a_drain():
    async with running(2, step_seconds=0.004) as engine:
        requests = streams()
        tasks = [asyncio.create_task(collect(engine, r)) for r in requests]
        await at_both(engine)
        restart = asyncio.create_task(engine.restart_replica(1, grace=60))
        await until(lambda: engine.replicas[1].status == "draining")
        kill(engine.replicas[1])
        assert await asyncio.wait_for(asyncio.gather(*tasks), 120) == [expected(r) for r in requests]
        await asyncio.wait_for(restart, 120)


@pytest.mark.slow
async def test_the_only_replica_is_replaced_and_its_streams_wait():
    async with running(1, step_seconds=0.004) as engine:
        requests = streams(4)
        tasks = [asyncio.create_task(collect(engine, r)) for r in requests]
        await at_both(engine)
        await engine.restart_all()
        assert await asyncio.wait_for(asyncio.gather(*tasks), 120) == [expected(r) for r in requests]


async def test_replicas_come_and_go():
    async with running(1, most=3, step_seconds=0.01) as engine:
        requests = streams(6)
        tasks = [asyncio.create_task(collect(engine, r)) for r in requests]
        await at_both(engine)
        await engine.scale(3)
        assert [r.index for r in engine.replicas] == [0, 1, 2]
        more = [request(f"m{i}", [i], max_tokens=40) for i in range(6)]
        tasks += [asyncio.create_task(collect(engine, r)) for r in more]
        await at_both(engine)
        await engine.scale(1)
        assert await asyncio.wait_for(asyncio.gather(*tasks), 120) == [expected(r) for r in (*requests, *more)]
        stats = await engine.stats()
        assert list(stats.replicas) == ["0"] and stats.finished - stats.aborted == sum(
            r.params.n for r in (*requests, *more)
        )
        for wrong in (0, 4, -1):
            with pytest.raises(InvalidRequest, match="expected 1 to 3"):
                await engine.scale(wrong)
        with pytest.raises(InvalidRequest, match="no replica 7"):
            await engine.restart_replica(7)


async def test_replicas_that_differ_do_not_serve_together():
    sizes = iter((256, 300))
    engine = FleetEngine(lambda i: ProcessEngine(fake={**FAKE, "vocab_size": next(sizes)}, hands_over=True), 2)
    with pytest.raises(ConfigError, match="vocab_size"):
        await engine.start()
    engine = fleet(1, most=2)
    await engine.start()
    engine._make = lambda i: ProcessEngine(fake={**FAKE, "vocab_size": 300}, hands_over=True)
    with pytest.raises(KvasirError, match="vocab_size"):
        await engine.scale(2)
    assert len(engine.replicas) == 1 and await collect(engine, request("a", [1])) == expected(request("a", [1]))
    await engine.stop()


@pytest.mark.slow
async def test_a_snapshot_shows_all_replicas():
    async with running(2, step_seconds=0.01) as engine:
        requests = [request(f"r{i}", [i] * 70, max_tokens=30) for i in range(6)]
        tasks = [asyncio.create_task(collect(engine, r)) for r in requests]
        await at_both(engine)
        snapshot = await engine.look()
        rows = [a.row for a in snapshot.answers if a.row >= 0]
        assert len(set(rows)) == len(rows) and max(rows) >= FAKE["max_rows"]
        assert snapshot.rows == 2 * FAKE["max_rows"] and snapshot.steps
        for group in snapshot.groups:
            assert sum(group.runs[1::2]) * group.per_cell >= group.total
            owners = {cell // 2 - 3 for cell in group.runs[::2] if cell >= 6}
            assert owners <= set(rows)
        views = engine.views
        assert [v.status for v in views] == ["ready"] * 2 and sum(v.open for v in views) == 6
        await asyncio.gather(*tasks)


async def test_a_stop_during_a_restart_leaves_no_process():
    engine = fleet(2, step_seconds=0.004)
    await engine.start()
    task = asyncio.create_task(collect(engine, request("r", [1], max_tokens=300)))
    await until(lambda: any(r.rows for r in engine.replicas))
    restart = asyncio.create_task(engine.restart_all())
    pids = {pid(r) for r in engine.replicas}
    await until(lambda: process(engine.replicas[0]).pid not in pids | {None})
    pids |= {pid(r) for r in engine.replicas}
    await engine.stop()
    with pytest.raises(EngineDead):
        await restart
    with pytest.raises(EngineDead):
        await task
    await until(lambda: not any(map(psutil.pid_exists, pids)))
