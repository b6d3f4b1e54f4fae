"""Sleep: engines that give their memory back and take it again, as processes, on a host, and as a fleet."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import psutil
import pytest

from kvasir import LLM
from kvasir.engine import spawning
from kvasir.engine.client import Sleeps
from kvasir.engine.fake import FakeEngine
from kvasir.engine.host import EngineHost
from kvasir.engine.remote import HostAddress, RemoteEngine
from kvasir.engine.subprocess import ProcessEngine
from kvasir.errors import ConfigError, EngineAsleep, EngineDead, InvalidRequest
from kvasir.fleet.engine import FleetEngine
from kvasir.statistics import EngineStats
from kvasir.types import SamplingParams
from tests.engine.hosting import Hosted
from tests.engine.test_process import FAKE, collect, expected, until
from tests.sched.drive import request

ASLEEP = "asleep"


MAKES = {
    "process": lambda: ProcessEngine(fake=FAKE),
    "remote": lambda: Hosted(ProcessEngine(fake=FAKE)),
    "inproc": lambda: FakeEngine(**FAKE),
    "fleet": lambda: FleetEngine(lambda i: ProcessEngine(fake=FAKE, hands_over=True), 2),
}


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name == "fleet")) for name in MAKES])
async def engine(request):
    engine = MAKES[request.param]()
    await engine.start()
    yield engine
    await engine.stop()


class Restless(FakeEngine):
    """An engine that cannot sleep."""

    sleep = None  # type: ignore[assignment]


def engines() -> int:
    """Processes and threads of engines."""
    processes = sum("kvasir.engine.worker" in " ".join(p.cmdline()) for p in psutil.Process().children())
    return processes + sum(thread.name == "kvasir-engine" for thread in threading.enumerate())


async def test_a_sleeping_engine_has_no_process_and_computes_again_when_woken(engine):
    asked = request("r", [1, 2, 3], max_tokens=20)
    before = engines()
    assert await collect(engine, asked) == expected(asked)
    await engine.sleep()
    assert engines() < before
    await until(lambda: engine.state.status == ASLEEP)
    assert not engine.ended
    for call in (engine.stats, engine.look, engine.reset_prefix_cache):
        with pytest.raises(EngineAsleep):
            await call()
    with pytest.raises(EngineAsleep, match="wake_up"):
        await collect(engine, asked)
    await engine.sleep()
    await engine.wake_up()
    assert engines() == before
    await until(lambda: engine.state.status == "ok")
    assert await collect(engine, asked) == expected(asked)
    await engine.wake_up()
    stats = await engine.stats()
    assert stats.finished == (1 if isinstance(engine, FakeEngine) else 2), "in processes the counters go on"
    await engine.check()


async def test_a_sleep_is_no_death(engine):
    await engine.sleep()
    await engine.wake_up()
    if isinstance(engine, FleetEngine):
        assert [view.restarts for view in engine.views] == [0, 0]
    inner = engine.there if isinstance(engine, Hosted) else engine
    if isinstance(inner, ProcessEngine):
        assert inner.restarts == 0


@pytest.mark.parametrize("drain", [0.0, 60.0])
async def test_requests_finish_in_the_time_they_have_or_end_with_an_error(engine, drain):
    asked = [request(f"r{i}", [i], max_tokens=60, seed=i, temperature=1.0) for i in range(4)]
    tasks = [asyncio.ensure_future(collect(engine, one)) for one in asked]
    await asyncio.sleep(0.1)
    await engine.sleep(drain)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    if drain:
        assert results == [expected(one) for one in asked]
    else:
        assert {type(result) for result in results} == {EngineAsleep}
    await engine.wake_up()
    assert await asyncio.gather(*(collect(engine, one) for one in asked)) == [expected(one) for one in asked]


async def test_calls_at_once_sleep_and_wake_once(engine):
    await asyncio.gather(*(engine.sleep() for _ in range(3)))
    await asyncio.gather(*(engine.wake_up() for _ in range(3)))
    asked = request("r", [1], max_tokens=5)
    assert await collect(engine, asked) == expected(asked)


async def test_a_sleeping_engine_can_be_stopped(engine):
    await engine.sleep()


async def test_a_stop_ends_a_wake_up():
    engine = ProcessEngine(fake=FAKE)
    await engine.start()
    await engine.sleep()
    waking = asyncio.ensure_future(engine.wake_up())
    await asyncio.sleep(0.05)
    await engine.stop()
    with pytest.raises(EngineDead):
        await asyncio.wait_for(waking, 30)
    assert engines() == 0


async def test_a_stop_ends_a_sleep_whose_process_has_not_ended(monkeypatch):
    engine = ProcessEngine(fake=FAKE)
    await engine.start()
    counted, stats = asyncio.Event(), engine.stats

    async def freeze() -> EngineStats:
        """The process answers its last question before the command to end, which it does not take then."""
        found = await stats()
        os.kill(engine.pid, signal.SIGSTOP)
        counted.set()
        return found

    monkeypatch.setattr(engine, "stats", freeze)
    monkeypatch.setattr(spawning, "END_SECONDS", 1.0)
    falling = asyncio.ensure_future(engine.sleep())
    await counted.wait()
    await asyncio.wait_for(engine.stop(), 60)
    with pytest.raises(EngineDead):
        await asyncio.wait_for(falling, 30)
    assert engines() == 0


async def test_an_engine_that_was_stopped_asleep_cannot_wake():
    engine = ProcessEngine(fake=FAKE)
    await engine.start()
    await engine.sleep()
    await engine.stop()
    with pytest.raises(EngineDead):
        await asyncio.wait_for(engine.wake_up(), 30)


@pytest.mark.slow
async def test_an_engine_that_cannot_start_sleeps_on():
    engine = ProcessEngine(fake=FAKE)
    await engine.start()
    try:
        await engine.sleep()
        spec = engine._spec
        engine._spec = type(spec)(None, {**FAKE, "nothing": 1})
        for _ in range(2):
            with pytest.raises(EngineDead):
                await engine.wake_up()
            assert engine.state.status == ASLEEP
        engine._spec = spec
        await engine.wake_up()
        asked = request("r", [1], max_tokens=5)
        assert await collect(engine, asked) == expected(asked)
    finally:
        await engine.stop()


async def test_pinned_adapters_and_followers_are_there_again():
    engine, snapshots = ProcessEngine(fake=FAKE), []
    await engine.start()
    try:
        engine.follow_cache(lambda changes: snapshots.append(changes) if changes.snapshot else None)
        await until(lambda: snapshots)
        await engine.sleep()
        await engine.wake_up()
        await until(lambda: len(snapshots) == 2)
    finally:
        await engine.stop()


async def test_a_dead_engine_does_not_sleep():
    engine = ProcessEngine(fake=FAKE)
    await engine.start()
    await engine.stop()
    with pytest.raises(EngineDead):
        await engine.sleep()


async def test_a_fleet_that_cannot_sleep_as_a_whole_stays_awake():
    fleet = FleetEngine(lambda i: Restless(**FAKE) if i else ProcessEngine(fake=FAKE), 2)
    await fleet.start()
    try:
        assert not isinstance(fleet.replicas[1].engine, Sleeps)
        with pytest.raises(InvalidRequest, match="replica 1 cannot sleep"):
            await fleet.sleep()
        asked = request("r", [1], max_tokens=5)
        assert await collect(fleet, asked) == expected(asked)
    finally:
        await fleet.stop()


async def test_a_sleeping_fleet_is_not_operated():
    fleet = MAKES["fleet"]()
    await fleet.start()
    try:
        await fleet.sleep()
        with pytest.raises(EngineAsleep):
            await fleet.restart_all()
    finally:
        await fleet.stop()


async def test_servers_in_front_of_the_same_replicas_sleep_and_wake_together(tmp_path):
    engine = ProcessEngine(fake=FAKE, hands_over=True)
    host = EngineHost(engine)
    await engine.start()
    await host.listen_unix(tmp_path / "s")
    fleets = [FleetEngine(lambda i: RemoteEngine(HostAddress(tmp_path / "s")), 1) for _ in range(2)]
    asked = request("r", [1], max_tokens=5)
    try:
        for one in fleets:
            await one.start()
        await fleets[0].sleep()
        await until(lambda: fleets[1].state.status == ASLEEP)
        for one in fleets:
            with pytest.raises(EngineAsleep):
                await collect(one, asked)
        await fleets[1].wake_up()
        for one in fleets:
            await until(lambda one=one: one.state.status == "ok")
            assert await collect(one, asked) == expected(asked)
            assert [view.restarts for view in one.views] == [0]
    finally:
        for one in fleets:
            await one.stop()
        await host.close()
        await engine.stop()


def test_the_bundled_model_sleeps_in_this_process():
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM("kvasir-mini", max_num_seqs=4, num_blocks=64, threads=1) as llm:
        said = lambda: llm.generate("Once upon a time", params)[0].outputs[0].token_ids  # noqa: E731
        before = said()
        for _ in range(2):
            llm.sleep(level=2)
            with pytest.raises(EngineAsleep):
                said()
            llm.wake_up(tags=["weights"])
            assert said() == before
        llm.sleep()


def test_what_sleeps():
    assert issubclass(ProcessEngine, Sleeps) and issubclass(FakeEngine, Sleeps) and not issubclass(Restless, Sleeps)
    assert issubclass(EngineAsleep, EngineDead) and not issubclass(ConfigError, EngineDead)
