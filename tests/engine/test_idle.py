"""What an engine does about time while it has nothing to compute."""

from __future__ import annotations

from kvasir.engine.core import EngineCore
from kvasir.runner.fake import FakeRunner
from kvasir.sched.scheduler import Scheduler
from kvasir.types import Request, SamplingParams


def test_an_idle_engine_unpins_an_expired_prefix():
    now = [0.0]
    fake = FakeRunner(block_size=16, num_blocks=16)
    core = EngineCore(fake, Scheduler(fake.capacity, clock=lambda: now[0]))
    core.add(Request("a", tuple(range(64)), SamplingParams(max_tokens=2, seed=1), cache_ttl=5.0))
    while core.has_work():
        core.step()
    assert core.stats().blocks_used == 4
    now[0] = 4.9
    assert core.stats().blocks_used == 4
    now[0] = 5.1
    assert core.stats().blocks_used == 0
    core.check()
