"""An executor that queues steps, as one does whose rows are on a device: what it samples is fed to the next step there,
and the host may read it once the step is awaited."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, replace

from kvasir.engine.core import EngineCore
from kvasir.plan import StepPlan
from kvasir.runner.eager_executor import EagerExecutor, EagerHandle, Results
from kvasir.runner.executor import ExecutorStep, Taken
from kvasir.runner.rows import Rows
from kvasir.runner.runner import Runner


class Queued(EagerExecutor):
    """The device is the thread of the eager executor, with its own rows. early: steps that were started before the
    ids of the last were read; late: the others. last: the latest step."""

    queues = True

    def bind(self, rows: Rows) -> None:
        self.host = rows
        super().bind(deepcopy(rows))
        self.unread = self.early = self.late = 0

    def start(self, step: ExecutorStep) -> QueuedHandle:
        self.host.arrays.ids[:] = -1  # nothing of a step comes from there
        self.early, self.late = self.early + bool(self.unread), self.late + (not self.unread)
        self.unread += 1
        self.last = QueuedHandle(self, step, self.submit(self.compute, step))
        return self.last

    # -- in the thread

    def compute(self, step: ExecutorStep) -> Results:
        self.follow(step.plan)
        found = super().compute(step)
        self.carries = {at: self.rows[step.works[at].row].carry for at in step.now}
        self.write(step, dict(zip(step.now, found.taken, strict=True)))
        return found

    def follow(self, plan: StepPlan) -> None:
        taken = tuple(join.row for join in plan.joined)  # the plan that left them may have been refused before it came
        self.rows.apply(replace(plan, left=(*plan.left, *taken)))

    def write(self, step: ExecutorStep, taken: dict[int, Taken]) -> None:
        for at, (tokens, _, carry, error) in taken.items():
            if not error:
                self.rows[step.works[at].row].take(step.works[at], tokens, carry)


@dataclass(slots=True)
class QueuedHandle(EagerHandle):
    executor: Queued
    awaited: bool = False
    begun: Future[list[Taken]] | None = None

    def wait(self) -> float:
        self.executor.unread -= 1
        self.awaited = True
        return EagerHandle.wait(self)

    def taken(self) -> list[Taken]:
        assert self.awaited, "the ids are on the device"
        return EagerHandle.taken(self)

    def begin(self, at: Sequence[int], masks: Sequence[bytes | None]) -> bool:
        if any(self.step.works[i].drafted for i in at):
            return False
        self.begun = self.executor.submit(self.draw, at, masks)
        return True

    def take(self, at: Sequence[int], masks: Sequence[bytes | None]) -> list[Taken]:
        return self.begun.result() if self.begun else EagerHandle.take(self, at, masks)

    def draw(self, at: Sequence[int], masks: Sequence[bytes | None]) -> list[Taken]:
        """In the thread. What was sampled without a mask that has come after all is as if it had not been."""
        executor, works = self.executor, self.step.works
        for i in executor.carries.keys() & set(at):
            executor.rows[works[i].row].carry = executor.carries[i]
        found = EagerHandle.draw(self, at, masks)
        executor.write(self.step, dict(zip(at, found, strict=True)))
        return found


def queue(core: EngineCore) -> Queued:
    """Puts one in the place of the core's eager executor."""
    runner = core.runner
    assert isinstance(runner, Runner)
    old = runner.executor
    assert isinstance(old, EagerExecutor)
    made = Queued(old.model, old.cache, runner.capacity.max_tokens_per_step, overlaps=True)
    core.runner = Runner(made, runner.capacity, runner.info)
    old.close()
    return made
