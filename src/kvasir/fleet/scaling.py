"""A fleet that sets the number of its replicas itself (fleet/autoscale.py decides), down to none if it may.

Without a replica, requests wait in the fleet and the first one starts a replica; the fleet counts as alive. After more
replicas came, requests that have no token yet are routed again, so that those come to the new replicas which would
only have waited.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable

from kvasir.engine.client import Engine, EngineState, FleetScale
from kvasir.errors import KvasirError
from kvasir.fleet.autoscale import FleetFacts, Limits, Past, capacity, decide
from kvasir.fleet.cost import ReplicaFacts, first_seconds
from kvasir.fleet.operations import LONGEST_PAUSE, Operations
from kvasir.fleet.replica import Routed, measured
from kvasir.sched.budget import StepTime
from kvasir.types import ServiceClass, Target

log = logging.getLogger("kvasir.fleet")

USUAL = Target(2.0, 0.1)  # of a class without targets
PERIOD = 0.5  # seconds between two decisions
GRACE = 5.0  # seconds for a replica that ends to finish its requests
RECENT = 10.0  # seconds for which first tokens count
FEW = 4  # first tokens that say nothing yet


class Scaling(Operations):
    """limits: of the number of replicas, which follows the load; None: only an operator changes it."""

    def __init__(
        self,
        make: Callable[[int], Engine],
        count: int,
        most: int | None = None,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(make, count, most)
        self._limits = limits
        self._clock = clock
        self.least = 1 if limits is None else limits.least
        self._wanted = count
        self._missing = asyncio.Event()  # a request found no replica
        self._busy = 0.0  # when there was a request
        self._firsts: deque[tuple[float, bool]] = deque(maxlen=1024)  # when first tokens came, and whether in time
        self._start_seconds = 0.0  # of the last start
        self._known: tuple[StepTime, int] = StepTime(), 1  # of the replicas: times of steps, rows
        self._failure = ""  # of the last start, until the next attempt

    @property
    def scaling(self) -> FleetScale | None:
        """The number of replicas that there should be, and its limits; None if only an operator changes it."""
        return self._limits and FleetScale(self._wanted, self._limits.least, self._limits.most)

    @property
    def asleep(self) -> bool:
        """Whether there is no replica, or none yet, and requests are what starts one."""
        if self.least or self._dead is not None or self._failure:
            return False
        return all(r.coming or r.draining for r in self.replicas)

    @property
    def state(self) -> EngineState:
        if self.asleep:
            return EngineState()
        if self._failure and not self.replicas and not self.ended:
            return EngineState("restarting", self._failure)
        return super().state

    async def start(self) -> None:
        before = self._clock()
        await super().start()
        self._busy = self._clock()
        self._start_seconds = self._busy - before
        if self._limits:
            self._begin(self._follow_load(self._limits))

    def _described(self) -> tuple[str, ...]:
        lines, limits = super()._described(), self._limits
        if not limits or not lines:
            return lines
        return (*lines, f"scaling   {limits.least} to {limits.most} replicas, fewer after {limits.delay:g} s")

    # -- the number follows the load ---------------------------------------------------------------------------

    async def _follow_load(self, limits: Limits) -> None:
        past, before, pause = Past(), self._clock(), PERIOD
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._missing.wait(), PERIOD)
            self._missing.clear()
            if self.sleeping:
                continue
            now = self._clock()
            facts = self._facts(now)
            self._wanted, past = decide(limits, facts, past, now - before)
            before = now
            if self._wanted == facts.replicas:
                continue
            log.info("from %d to %d replicas: %s", facts.replicas, self._wanted, facts)
            try:
                await self._operate(lambda: self._scale(self._wanted, GRACE))
                pause = PERIOD
            except KvasirError as error:
                log.error("a replica does not start: %s", error)
                self._failure, pause = str(error), min(2 * pause, LONGEST_PAUSE)
                await asyncio.sleep(pause)
                self._failure = ""
            self._firsts.clear()
            if len(self.replicas) > facts.replicas > 0:
                await self._spread()

    async def _add(self, index: int) -> None:
        before = self._clock()
        await super()._add(index)
        self._start_seconds = self._clock() - before

    def _facts(self, now: float) -> FleetFacts:
        """What the decision depends on."""
        entries = self._open.values()
        if entries:
            self._busy = now
        there = [r for r in self.replicas if r.answers and r.stats.max_rows]
        if there:
            self._known = measured(there)[0], max(r.stats.max_rows for r in there)
        model, batch = self._known
        target = self.info.targets.get(ServiceClass.INTERACTIVE, USUAL)
        rows = sum(len(e.open) for e in entries)
        context = sum(e.tokens * len(e.open) for e in entries) / max(1, rows)
        unplaced = sum(e.tokens for e in entries if e.replica is None)
        backlog = sum(view.backlog for view in self.views)
        if unplaced:
            backlog += first_seconds(ReplicaFacts(backlog=unplaced, model=model), 1)
        return FleetFacts(
            replicas=len(self.replicas),
            requests=len(entries),
            rows=rows,
            capacity=capacity(model, context, target.tpot, batch),
            backlog=backlog,
            ttft=target.ttft,
            in_time=self._in_time(now),
            idle=now - self._busy,
            start=self._start_seconds,
        )

    def _in_time(self, now: float) -> float:
        """The share of the first tokens lately that met the targets of their classes; those that are late already
        count. 1 if there are only a few."""
        recent = [met for when, met in self._firsts if now - when <= RECENT]
        late = sum(not e.answered and not self._meets(e, now) for e in self._open.values())
        count = len(recent) + late
        return sum(recent) / count if count >= FEW else 1.0

    def _meets(self, entry: Routed, now: float) -> bool:
        """Whether a first token that comes now is in time."""
        target = self.info.targets.get(entry.request.slo)
        return target is None or now - entry.arrived <= target.ttft

    def _answered(self, entry: Routed) -> None:
        """Notes that the first token of a request came."""
        entry.answered = True
        now = self._clock()
        self._firsts.append((now, self._meets(entry, now)))

    async def _spread(self) -> None:
        """Lets requests without a token be routed again."""
        for entry in list(self._open.values()):
            if entry.replica and not entry.answered and not entry.moving and not entry.replica.draining:
                entry.moving = True
                await entry.replica.engine.abort(entry.sent_id)
