"""The number of replicas follows the load, down to none and back, and no stream breaks."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kvasir.cli.fleet_options import FleetOptions
from kvasir.engine.client import Engine, EngineState
from kvasir.engine.fake import FakeEngine
from kvasir.engine.subprocess import ProcessEngine
from kvasir.errors import ConfigError, EngineDead, InvalidRequest, QueueFull
from kvasir.fleet import autoscale, scaling
from kvasir.fleet.autoscale import Limits
from kvasir.fleet.engine import FleetEngine
from kvasir.types import FinishReason
from tests.engine.test_process import FAKE, collect, expected, until
from tests.fleet.fleets import kill
from tests.fleet.test_roles import OPTIONS
from tests.sched.drive import request

DELAY = 0.15  # seconds


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(scaling, "PERIOD", 0.02)
    monkeypatch.setattr(scaling, "GRACE", 0.1)
    monkeypatch.setattr(autoscale, "SOONEST", 0.05)
    monkeypatch.setattr(autoscale, "LATEST", 0.05)
    monkeypatch.setattr(autoscale, "WORTH", 0.0)


class Gated(FakeEngine):
    """Starts once it may."""

    gate = asyncio.Event()
    started = False

    @property
    def state(self) -> EngineState:
        return super().state if self.started else EngineState("starting")

    async def start(self) -> None:
        await self.gate.wait()
        await super().start()
        self.started = True


@asynccontextmanager
async def scaled(least: int, most: int, make: type[Engine] = FakeEngine, delay: float = DELAY, **options):
    """A started fleet whose load sets the number of replicas."""
    fake = FAKE | {name: options.pop(name) for name in list(options) if name in FAKE}

    def engine(index: int):
        return ProcessEngine(fake=fake, hands_over=True, patient=True) if make is ProcessEngine else make(**fake)

    fleet = FleetEngine(engine, max(1, least), most=most, limits=Limits(least, most, delay), **options)
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.stop()


@pytest.fixture
def gate(monkeypatch):
    """Open at first."""
    gate = asyncio.Event()
    gate.set()
    monkeypatch.setattr(Gated, "gate", gate)
    return gate


@pytest.mark.parametrize("make", [FakeEngine, pytest.param(ProcessEngine, marks=pytest.mark.slow)])
async def test_to_zero_and_back(make):
    async with scaled(0, 2, make) as fleet:
        first, second = (request(name, [1, 2], max_tokens=20, n=2, temperature=1.0, seed=1) for name in "ab")
        assert await collect(fleet, first) == expected(first)
        await until(lambda: not fleet.replicas)
        assert await fleet.alive() and fleet.state.status == "ok" and not fleet.ended
        stats = await fleet.stats()
        assert stats.finished == 2 and stats.max_rows == 0 and not stats.replicas
        with pytest.raises(EngineDead):
            await fleet.look()
        assert await collect(fleet, second) == expected(second)
        assert [v.routed for v in fleet.views] == [2], "its counters go on"
        stats = await fleet.stats()
        assert stats.finished == 4
        if make is ProcessEngine:
            assert fleet.summary[-1] == "scaling   0 to 2 replicas, fewer after 0.15 s"
        await until(lambda: not fleet.replicas)
        await fleet.check()


async def test_a_burst_starts_replicas_which_share_what_waits_and_end_later():
    async with scaled(1, 3, max_rows=4, step_seconds=0.005) as fleet:
        requests = [request(f"r{i}", [i], max_tokens=30, seed=i, temperature=1.0) for i in range(24)]
        tasks = [asyncio.create_task(collect(fleet, r)) for r in requests]
        await until(lambda: sum(r.takes for r in fleet.replicas) == 3)
        assert fleet.scaling and (fleet.scaling.target, fleet.scaling.least, fleet.scaling.most) == (3, 1, 3)
        assert await asyncio.gather(*tasks) == [expected(r) for r in requests]
        assert fleet.replicas[0].counts.moved > 0, "waiting requests were routed again"
        assert all(r.counts.routed for r in fleet.replicas)
        longer = [request(f"long{i}", [i], max_tokens=150) for i in range(2)]
        tasks = [asyncio.create_task(collect(fleet, r)) for r in longer]
        await until(lambda: len(fleet.replicas) == 1)
        assert not all(task.done() for task in tasks)
        assert await asyncio.gather(*tasks) == [expected(r) for r in longer]
        await fleet.check()


async def test_constant_load_does_not_change_the_number():
    async with scaled(1, 3, max_rows=4, step_seconds=0.005, delay=0.05) as fleet:
        seen = set()

        async def client(i: int) -> None:
            for turn in range(6):
                await collect(fleet, request(f"{i}-{turn}", [i], max_tokens=10))
                seen.add(len(fleet.replicas))

        await asyncio.gather(*map(client, range(3)))
        assert seen == {1}


async def test_requests_wait_for_a_start_within_their_deadline_and_the_queue(gate):
    async with scaled(0, 1, Gated, max_waiting=2) as fleet:
        await until(lambda: not fleet.replicas)
        gate.clear()
        held = [request(name, [1], max_tokens=5) for name in "ab"]
        tasks = [asyncio.create_task(collect(fleet, r)) for r in held]
        await until(lambda: [v.status for v in fleet.views] == ["starting"])
        assert await fleet.alive() and fleet.state.status == "ok"
        with pytest.raises(QueueFull):
            await collect(fleet, request("c", [1]))
        tasks[1].cancel()
        await asyncio.gather(tasks[1], return_exceptions=True)
        late = replace(request("late", [1], max_tokens=5), deadline=0.05)
        assert [d.finish_reason async for d in fleet.submit(late)] == [FinishReason.TIMEOUT]
        gone = asyncio.ensure_future(anext(aiter(fleet.submit(request("gone", [1])))))
        await until(lambda: "gone" in fleet._open)
        await fleet.abort("gone")
        assert (await gone).finish_reason is FinishReason.ABORT
        gate.set()
        assert await tasks[0] == expected(held[0])


async def test_a_start_that_fails_is_tried_again():
    failures = 0

    class Failing(FakeEngine):
        async def start(self) -> None:
            nonlocal failures
            if 0 < failures <= 2:
                failures += 1
                raise EngineDead("no memory")
            await super().start()

    async with scaled(0, 1, Failing) as fleet:
        await until(lambda: not fleet.replicas)
        failures = 1
        asked = request("a", [1], max_tokens=5)
        task = asyncio.create_task(collect(fleet, asked))
        await until(lambda: fleet.state.status == "restarting")
        assert not await fleet.alive() and fleet.state.reason == "no memory"
        assert await task == expected(asked) and failures == 3
        assert await fleet.alive()


async def test_operators_change_the_number_within_the_limits():
    async with scaled(0, 2, delay=60.0) as fleet:
        await fleet.scale(2)
        assert [r.index for r in fleet.replicas] == [0, 1]
        await fleet.scale(0)
        assert not fleet.replicas and await fleet.alive()
        for wrong in (-1, 3):
            with pytest.raises(InvalidRequest, match="expected 0 to 2"):
                await fleet.scale(wrong)
        assert await collect(fleet, request("a", [1])) == expected(request("a", [1]))
    async with scaled(2, 3, delay=60.0) as fleet:
        with pytest.raises(InvalidRequest, match="expected 2 to 3"):
            await fleet.scale(1)


@pytest.mark.slow
async def test_a_replica_that_was_woken_dies():
    async with scaled(0, 2, ProcessEngine, step_seconds=0.01) as fleet:
        await until(lambda: not fleet.replicas)
        asked = request("a", [1], max_tokens=60)
        task = asyncio.create_task(collect(fleet, asked))
        await until(lambda: any(e.answered for e in fleet._open.values()))
        kill(fleet.replicas[0])
        assert await task == expected(asked)


async def test_a_stop_while_a_replica_starts(gate):
    async with scaled(0, 1, Gated) as fleet:
        await until(lambda: not fleet.replicas)
        gate.clear()
        task = asyncio.create_task(collect(fleet, request("a", [1])))
        await until(lambda: [v.status for v in fleet.views] == ["starting"])
    with pytest.raises(EngineDead):
        await task


def test_options():
    assert FleetOptions().limits is None and not FleetOptions().several
    some = FleetOptions(min_replicas=0, max_replicas=4)
    assert (some.count, some.most, some.limits) == (1, 4, Limits(0, 4, 300.0))
    some.check(OPTIONS, alone=True)
    one = FleetOptions(min_replicas=0)
    assert one.several and one.limits == Limits(0, 1)
    assert FleetOptions(min_replicas=2, max_replicas=3, scale_down_delay=9.0).count == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_replicas": -1}, "expected 0 to"),
        ({"min_replicas": 4, "max_replicas": 2}, "below the 4"),
        ({"min_replicas": 1, "prefill_replicas": 1, "decode_replicas": 1}, "no roles"),
        ({"scale_down_delay": -1.0}, "expected 0 to 86400"),
        ({"scale_down_delay": float("nan")}, "expected 0 to 86400"),
    ],
)
def test_wrong_options_are_refused(given, message):
    with pytest.raises(ConfigError) as error:
        FleetOptions(**given).check(OPTIONS, alone=True)
    assert message in f"{error.value} {error.value.hint}"
    with pytest.raises(ConfigError, match="several"):
        FleetOptions(min_replicas=0).check(OPTIONS, alone=False)
