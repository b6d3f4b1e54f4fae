"""FakeEngine: the real scheduler, pool and loop over the FakeRunner. For tests of servers and fronts without torch."""

from __future__ import annotations

from kvasir.engine.adapter_loader import make_adapters
from kvasir.engine.core import EngineCore
from kvasir.engine.inproc import InProcessEngine
from kvasir.runner.fake import FakeRunner
from kvasir.sched.scheduler import Scheduler


class FakeEngine(InProcessEngine):
    """Takes FakeRunner's options, and the scheduler's eos_ids and max_waiting."""

    def __init__(self, *, eos_ids: tuple[int, ...] = (), max_waiting: int = 1024, **runner):
        def build() -> EngineCore:
            fake = FakeRunner(**runner)
            adapters = make_adapters(fake, fake.info)
            scheduler = Scheduler(fake.capacity, eos_ids=eos_ids, max_waiting=max_waiting, adapters=adapters)
            return EngineCore(fake, scheduler)

        super().__init__(build)
