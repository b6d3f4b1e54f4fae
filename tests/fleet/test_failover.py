"""A fleet of real engine processes over the FakeRunner: replicas die in each phase of a request, and every stream gets
the tokens that it gets alone."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from kvasir.engine.subprocess import ProcessEngine
from kvasir.fleet.engine import FleetEngine
from tests.engine.test_process import FAKE, collect, expected, until
from tests.sched.drive import request


def fleet(count: int = 2, step_seconds: float = 0.004, **more) -> FleetEngine:
    fake = {**FAKE, "step_seconds": step_seconds}
    return FleetEngine(lambda i: ProcessEngine(fake=fake, hands_over=True, patient=True), count, **more)


@pytest.fixture
async def pair():
    engine = fleet()
    await engine.start()
    yield engine
    await engine.stop()


async def test_streams_of_a_killed_replica_continue_on_another(pair):
    requests = [request(f"r{i}", [i], max_tokens=60, n=1 + i % 2, seed=i, temperature=1.0) for i in range(8)]
    tasks = [asyncio.create_task(collect(pair, r)) for r in requests]
    await until(lambda: all(r.rows for r in pair.replicas))
    await asyncio.sleep(0.1)
    os.kill(pair.replicas[0].engine.pid, signal.SIGKILL)
    answers = await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert answers == [expected(r) for r in requests]
    assert pair.replicas[0].counts.lost > 0
    await until(lambda: all(r.takes for r in pair.replicas))
    await pair.check()
