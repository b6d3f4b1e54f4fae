"""EngineCore: one step of the engine, ids in and ids out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvasir.plan import Capacity, StepPlan, StepResult
from kvasir.sched.scheduler import Scheduler
from kvasir.types import Delta, EngineStats, ModelInfo, Request

log = logging.getLogger("kvasir.engine")


class Runner(Protocol):
    """What the core drives: `execute` starts a forward and returns at once, `sample` gives its result."""

    capacity: Capacity
    info: ModelInfo

    def execute(self, plan: StepPlan) -> Any: ...

    def sample(self, pending: Any, masks: Any = None) -> StepResult: ...


class EngineCore:
    """Joins a scheduler and a runner. Not thread-safe: one thread calls it."""

    def __init__(self, runner: Runner, scheduler: Scheduler, summary: Sequence[str] = ()):
        """summary: lines for people that say what was decided, and why."""
        self.summary = tuple(summary)
        self.runner = runner
        self.scheduler = scheduler
        self.info = runner.info
        self._dirty = False  # something ran since the last check
        self.steps = 0
        self.step_seconds = 0.0
        self.plan_listener: Callable[[StepPlan], None] | None = None  # called with each plan before it runs

    def add(self, request: Request) -> None:
        """Takes a request. Raises InvalidRequest or QueueFull; nothing is kept then."""
        self.scheduler.add(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.scheduler.abort(request_id, index)

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def step(self) -> list[Delta]:
        """Plans, computes and commits one step; returns what it adds. A step that raises costs nobody else."""
        plan = self.scheduler.plan()
        if plan is None:
            return []
        self._dirty = True
        if self.plan_listener:
            self.plan_listener(plan)
        begun = time.perf_counter()
        try:
            pending = self.runner.execute(plan)
            result = self.runner.sample(pending)
        except Exception as error:
            log.exception("step %d failed", plan.step)
            return self.scheduler.fail(plan, f"{type(error).__name__}: {error}")
        deltas = self.scheduler.commit(plan, result)
        self.steps += 1
        self.step_seconds += time.perf_counter() - begun
        return deltas

    def check(self) -> None:
        """Proves that rows and blocks add up. Raises AssertionError."""
        self.scheduler.check()

    def rest(self) -> None:
        """Called whenever there is nothing to compute: checks once after each busy time. Raises AssertionError."""
        if self._dirty:
            self.check()
            self._dirty = False

    def stats(self) -> EngineStats:
        s = self.scheduler
        return EngineStats(
            running=len(s.running),
            waiting=len(s.waiting),
            blocks_total=s.kv.total,
            blocks_used=s.kv.used,
            block_size=s.capacity.block_size,
            steps=self.steps,
            step_seconds=self.step_seconds,
            prompt_tokens=s.prompt_tokens,
            generated_tokens=s.generated_tokens,
            preemptions=s.preemptions,
            finished=s.finished,
            aborted=s.aborted,
        )
