"""A large fleet in virtual time whose number of replicas follows the load: `fleet.autoscale` decides, and things happen
in the order of `fleet.scaling`.

A start takes its time, during which nothing else is decided. A replica that ends takes no more requests, finishes
those that it can, and gives the rest to others, which compute their prompts and the answers so far. A replica counts
from the begin of its start to its end.
"""

from __future__ import annotations

from collections import deque
from math import inf

import numpy as np

from kvasir.cli.simulate.coarse import CoarseReplica, Job
from kvasir.cli.simulate.coarse_world import CoarseWorld
from kvasir.cli.simulate.replica import Setup
from kvasir.cli.simulate.trace import Asked
from kvasir.cli.simulate.world import Outcome, Progress
from kvasir.fleet.autoscale import FleetFacts, Limits, Past, capacity, decide
from kvasir.fleet.scaling import FEW, GRACE, PERIOD, RECENT
from kvasir.sched.budget import StepTime

LOOK = 0.1  # seconds between two looks whether a replica that ends is empty


class ScaledWorld(CoarseWorld):
    """As `CoarseWorld`, with a number of replicas within `setup.limits`."""

    def __init__(self, trace: list[Asked], setup: Setup, limits: Limits):
        super().__init__(trace, setup)
        self._limits = limits
        self._count = max(1, limits.least)  # replicas, with one that starts and one that ends
        self._router.takes = np.arange(self._count)
        self._past = Past()
        self._decided = 0.0  # when
        self._next = PERIOD  # when the next decision is due, or the next look at a start or an end
        self._started = inf  # when those that start are ready
        self._target = self._count  # where those that end lead to
        self._deadline = 0.0  # of the one that ends
        self._waiting: list[Job] = []  # requests without a replica
        self._unanswered: dict[int, float] = {}  # requests without a token: when they arrived
        self._firsts: deque[tuple[float, bool]] = deque(maxlen=1024)  # when first tokens came, and whether in time
        self._open = self._tokens = 0  # requests, tokens of their prompts
        self._busy = 0.0  # when there was a request
        self._since = 0.0  # when the number of replicas changed
        self.replica_seconds = 0.0

    def run(self, progress: Progress = lambda done: None) -> Outcome:
        outcome = super().run(progress)
        self._recount(self._count)
        outcome.replica_seconds = self.replica_seconds
        return outcome

    def _recount(self, count: int) -> None:
        """There are so many replicas from now on."""
        self.replica_seconds += self._count * (self.now - self._since)
        self._count, self._since = count, self.now

    # -- requests ----------------------------------------------------------------------------------------------

    def _place(self, job: Job) -> None:
        if job.index not in self._unanswered and not self._begun(job):
            self._unanswered[job.index] = job.arrived
            self._open += 1
            self._tokens += job.asked.prompt
            self._busy = self.now
        if len(self._router.takes):
            return super()._place(job)
        self._waiting.append(job)
        if self._started == inf:
            self._next = self.now

    def _begun(self, job: Job) -> bool:
        served = self.outcome.served[job.index]
        return served is not None and bool(served.tokens)

    def _begin(self, job: Job) -> None:
        super()._begin(job)
        if (arrived := self._unanswered.pop(job.index, None)) is not None:
            self._firsts.append((self.now, self.now - arrived <= self.setup.target.ttft))

    def _end(self, job: Job) -> None:
        super()._end(job)
        self._open -= 1
        self._tokens -= self.trace[job.index].prompt
        self._busy = self.now

    # -- the number of replicas ----------------------------------------------------------------------------------

    def _wakes(self) -> float:
        return self._next if self._ended < len(self.trace) else inf

    def _wake(self) -> None:
        self._next = self.now + PERIOD
        if self._started < inf:
            self._open_new()
        elif self._target < self._count:
            self._end_last()
        else:
            self._decide()

    def _decide(self) -> None:
        wanted, self._past = decide(self._limits, self._facts(), self._past, self.now - self._decided)
        self._decided = self.now
        if wanted > self._count:
            self._recount(wanted)
            self._target = wanted
            self._next = self._started = self.now + self.setup.start
        elif wanted < self._count:
            self._target = wanted
            self._retire()

    def _open_new(self) -> None:
        """Those that were starting take requests."""
        before, self._started = len(self._router.takes), inf
        self._router.takes = np.arange(self._count)
        self._firsts.clear()
        moved, self._waiting = self._waiting, []
        for index in range(before):
            moved += self._taken_from(index, all=False)
        for job in sorted(moved, key=lambda job: job.index):
            self._place(job)

    def _retire(self) -> None:
        """The last replica takes no more requests."""
        self._router.takes = np.arange(self._count - 1)
        self._deadline = self.now + GRACE
        self._next = self.now

    def _end_last(self) -> None:
        last = self._count - 1
        if self._router.requests[last] and self.now < self._deadline:
            self._next = self.now + LOOK
            return
        moved = self._taken_from(last, all=True)
        self._router.keep(last, [], self._replicas[last].cache.blocks)
        self._replicas[last] = CoarseReplica(self.setup)
        self._settle(last)
        self._recount(last)
        for job in moved:
            self._place(job)
        if self._target < self._count:
            self._retire()
        else:
            self._firsts.clear()

    def _taken_from(self, index: int, all: bool) -> list[Job]:
        """The requests of a replica that go on elsewhere: those without a token, or all."""
        self._advance(index)
        moved = self._replicas[index].give_up(all)
        for _ in moved:
            self._router.end(index)
        self._settle(index)
        return moved

    def _facts(self) -> FleetFacts:
        setup, target = self.setup, self.setup.target
        model = StepTime(setup.costs)
        context = self._tokens / max(1, self._open) + self._router.answer / 2
        token, _, _, step = setup.costs
        unplaced = sum(job.asked.prompt for job in self._waiting)
        return FleetFacts(
            replicas=self._count,
            requests=self._open,
            rows=self._open,
            capacity=capacity(model, context, target.tpot, setup.rows),
            backlog=self._router.backlog_seconds + (token * unplaced + step if unplaced else 0.0),
            ttft=target.ttft,
            in_time=self._in_time(),
            idle=self.now - self._busy if not self._open else 0.0,
            start=setup.start,
        )

    def _in_time(self) -> float:
        """The share of the first tokens lately that were in time; those that are late already count."""
        while self._firsts and self.now - self._firsts[0][0] > RECENT:
            self._firsts.popleft()
        late = 0
        for arrived in self._unanswered.values():  # in the order of their arrival
            if self.now - arrived <= self.setup.target.ttft:
                break
            late += 1
        count = len(self._firsts) + late
        return sum(met for _, met in self._firsts) / count if count >= FEW else 1.0
