"""An engine in virtual time: the real scheduler, pool and prefix tree over a simulated machine.

    add -> start: plans a step and returns its duration -> end: commits it and returns the deltas

`StepTime` gives the duration of a step: seconds per prefill token, decode row, key read and step. The scheduler's own
cost model begins empty and learns, as in an engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvasir.caches import PagedKV
from kvasir.cli.simulate.adapters import NO_ADAPTERS, AdapterSetup, SimulatedAdapters
from kvasir.cli.simulate.pushed import PushedBlocks
from kvasir.errors import QueueFull
from kvasir.fleet.autoscale import Limits
from kvasir.plan import CacheGroup, Capacity, RowResult, StepPlan, StepResult, pack_ids
from kvasir.sched.budget import StepTime, predict
from kvasir.sched.request_table import RequestTable
from kvasir.sched.scheduler import Scheduler
from kvasir.sched.sequence import Sequence
from kvasir.sched.service import TARGETS, Decoding, Service, load_of
from kvasir.types import Delta, Request, ServiceClass, Target, each_delta

POLICIES = ("ours", "fcfs", "static")


@dataclass(frozen=True, slots=True)
class Setup:
    """The simulated service. costs: as in StepTime. rate: factor by which the trace's requests are sped up. memory:
    tokens, of each replica. step_tokens: maximum tokens of a step; fcfs and static exceed it for a single longer
    prompt. replicas: engines that compute whole requests. prefill, decode: engines that compute prompts, and answers;
    with these, `replicas` does not count. router: see kvasir.fleet.cost. transfer: seconds for the keys and values of
    a token from one engine to another. limits: of a number of replicas that follows the load; `replicas` does not count
    with them. start: seconds in which a replica starts."""

    policy: str
    costs: tuple[float, float, float, float]
    rate: float = 1.0
    memory: int = 400_000
    rows: int = 256
    step_tokens: int = 2048
    block_size: int = 64
    max_waiting: int = 1024
    target: Target = TARGETS[ServiceClass.INTERACTIVE]
    replicas: int = 1
    prefill: int = 0
    decode: int = 0
    router: str = "cost"
    transfer: float = 5e-6
    adapters: AdapterSetup = NO_ADAPTERS
    limits: Limits | None = None
    start: float = 30.0

    @property
    def name(self) -> str:
        """Of a fleet its replicas and its router, else the policy."""
        if self.limits:
            return f"{self.limits.least}-{self.limits.most}x {self.router}"
        if self.prefill:
            return f"{self.prefill}P+{self.decode}D {self.router}"
        return f"{self.replicas}x {self.router}" if self.replicas > 1 else self.policy


class WholePrompts(Service):
    """Scheduling without chunked prefill: whole prompts in the order of arrival, while other sequences wait for their
    next token."""

    def order(self, running: list[Sequence], table: RequestTable | None, now: float) -> list[Sequence]:
        if table:
            table.moved.clear()
        return sorted([*running, *(table.waiting if table else ())], key=lambda seq: seq.order)

    def allowance(self, decodes: Decoding, wanting: Iterable[Sequence]) -> int:
        return max(self._whole, next(iter(wanting)).pending)


class SimulatedReplica:
    """longest: tokens of the longest request. answer_id: the id that every step samples. pushed: blocks that other
    replicas computed, for one that computes answers."""

    def __init__(
        self,
        setup: Setup,
        longest: int,
        answer_id: int,
        clock: Callable[[], float],
        pushed: PushedBlocks | None = None,
    ):
        s, whole = setup, setup.policy != "ours"
        capacity = Capacity(
            max_rows=s.rows,
            max_tokens_per_step=s.step_tokens + longest + s.rows if whole else s.step_tokens,
            max_model_len=longest,
            block_size=s.block_size,
            groups=(CacheGroup(PagedKV(), (0,), bytes_per_block=1),),
            num_blocks=(s.memory // s.block_size + 1,),
            vocab_size=answer_id + 1,
        )
        self.adapters = SimulatedAdapters(s.adapters, clock)
        targets = {c: s.target for c in ServiceClass}
        service = WholePrompts(targets, s.step_tokens, s.block_size, capacity.max_tokens_per_step) if whole else None
        self.scheduler = Scheduler(
            capacity,
            bidirectional=whole,
            max_waiting=s.max_waiting,
            targets=targets,
            clock=clock,
            service=service,
            tier=pushed,
            adapters=self.adapters.pool,
        )
        self.setup, self.pushed = setup, pushed
        self.truth = StepTime(setup.costs)
        self.plan: StepPlan | None = None  # of the step under way
        self.ends = 0.0  # when the step under way ends
        self._seconds = 0.0
        self._answer_id = answer_id
        self._results = [(RowResult(row), RowResult(row, (answer_id,))) for row in range(s.rows)]

    def add(self, request: Request) -> None:
        """Takes a request. Raises QueueFull."""
        self.scheduler.add(request)

    @property
    def waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def start(self, now: float) -> float | None:
        """Begins a step; returns its duration in seconds. None: all requests wait for adapters, until `wakes`."""
        self.adapters.arrive()
        assert not self.scheduler.take_adapters(), "adapters that cannot be used"
        plan = self.scheduler.plan() or self.scheduler.plan()  # the first may only have asked for pushed blocks
        if plan is None:
            assert self.wakes < math.inf, "no request can be scheduled, and none is running"
            return None
        self.plan = plan
        self._seconds = predict(self.truth, load_of(plan)) if plan.computes else 0.0
        self.ends = now + self._seconds
        return self._seconds

    @property
    def wakes(self) -> float:
        """When the next adapter is loaded; infinite if none loads."""
        return self.adapters.next_end

    def end(self) -> list[Delta]:
        """Commits the step under way; returns its deltas."""
        plan, self.plan = self.plan, None
        assert plan is not None
        if plan.computes:
            self.scheduler.service.observe(plan, self._seconds)
        rows = tuple(self._results[w.row][w.sample] for w in plan.work)
        result = StepResult(plan.step, rows, decoded=pack_ids([self._answer_id] * len(plan.decodes)))
        return each_delta(self.scheduler.commit(plan, result))


class StaticReplica(SimulatedReplica):
    """Static batches: the first requests in the queue, as many as fit into rows and memory, begin together, and the
    next batch begins when all of them have ended. It knows output lengths in advance, which favors it."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._queue: list[Request] = []

    def add(self, request: Request) -> None:
        if self.waiting >= self.setup.max_waiting:
            raise QueueFull("the queue is full", "try again later")
        self._queue.append(request)

    @property
    def waiting(self) -> int:
        return len(self._queue) + super().waiting

    @property
    def has_work(self) -> bool:
        return bool(self._queue) or super().has_work

    def start(self, now: float) -> float | None:
        if not self.scheduler.has_work():
            self._batch()
        return super().start(now)

    def _batch(self) -> None:
        size, room = 0, self.scheduler.kv.total
        for request in self._queue[: self.setup.rows]:
            room -= -(-(len(request.prompt_ids) + (request.params.max_tokens or 0)) // self.setup.block_size)
            if size and room < 0:
                break
            size += 1
        for request in self._queue[:size]:
            super().add(request)
        del self._queue[:size]
