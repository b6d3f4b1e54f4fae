"""Fleets of real engine processes over the FakeRunner, for tests."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager

from kvasir.engine.subprocess import ProcessEngine
from kvasir.fleet.engine import FleetEngine
from kvasir.fleet.replica import Replica
from tests.engine.test_process import FAKE, until


def fleet(count: int = 2, hang_seconds: float = 20.0, most: int | None = None, policy: str = "cost", **fake):
    """A fleet that is not started. fake: options of the FakeRunner."""

    def make(index: int) -> ProcessEngine:
        return ProcessEngine(fake={**FAKE, **fake}, hands_over=True, patient=True, hang_seconds=hang_seconds)

    return FleetEngine(make, count, most=most, policy=policy)


@asynccontextmanager
async def running(*args, **options):
    """A started fleet that must be free of leaks in the end."""
    engine = fleet(*args, **options)
    await engine.start()
    try:
        yield engine
        await all_ready(engine)
        await engine.check()
    finally:
        await engine.stop()


async def all_ready(engine: FleetEngine) -> None:
    await until(lambda: all(r.takes for r in engine.replicas))


def process(replica: Replica) -> ProcessEngine:
    assert isinstance(replica.engine, ProcessEngine)
    return replica.engine


def pid(replica: Replica) -> int:
    found = process(replica).pid
    assert found is not None
    return found


def kill(replica: Replica, kind: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pid(replica), kind)


async def at_both(engine: FleetEngine, seconds: float = 0.05) -> None:
    """Returns when each replica has choices, a moment later."""
    await until(lambda: all(r.rows for r in engine.replicas))
    await asyncio.sleep(seconds)
