"""A service in virtual time: the real scheduler, pool and prefix tree, with a simulated machine and a virtual clock.

    due requests -> Scheduler.add -> plan -> the clock advances by the step's duration -> commit -> times of tokens

`StepTime` gives the duration of a step: seconds per prefill token, decode row, key read and step. The scheduler's own
cost model begins empty and learns, as in an engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvasir.caches import PagedKV
from kvasir.cli.simulate.adapters import NO_ADAPTERS, AdapterSetup, SimulatedAdapters
from kvasir.cli.simulate.trace import Asked, Prompts
from kvasir.errors import QueueFull
from kvasir.plan import CacheGroup, Capacity, RowResult, StepPlan, StepResult, pack_ids
from kvasir.sched.budget import StepTime, predict
from kvasir.sched.request_table import RequestTable
from kvasir.sched.scheduler import Scheduler
from kvasir.sched.sequence import Sequence
from kvasir.sched.service import TARGETS, Decoding, Service, load_of
from kvasir.types import Delta, Request, SamplingParams, ServiceClass, Target, each_delta

POLICIES = ("ours", "fcfs", "static")
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Setup:
    """The simulated service. costs: as in StepTime. rate: factor by which the trace's requests are sped up. memory:
    tokens. step_tokens: maximum tokens of a step; fcfs and static exceed it for a single longer prompt."""

    policy: str
    costs: tuple[float, float, float, float]
    rate: float = 1.0
    memory: int = 400_000
    rows: int = 256
    step_tokens: int = 2048
    block_size: int = 64
    max_waiting: int = 1024
    target: Target = TARGETS[ServiceClass.INTERACTIVE]
    adapters: AdapterSetup = NO_ADAPTERS


@dataclass(slots=True)
class SimulatedShares:
    """One request, in seconds of the virtual clock."""

    arrived: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    done: bool = False

    @property
    def ttft(self) -> float:
        return self.first - self.arrived

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 if there are none."""
        return (self.last - self.first) / max(1, self.tokens - 1)

    def take(self, delta: Delta, now: float) -> None:
        if not self.tokens:
            self.first = now
        self.tokens += len(delta.token_ids)
        self.last = now
        self.done = delta.finish_reason is not None

    def meets(self, target: Target) -> bool:
        return self.done and self.ttft <= target.ttft and self.tpot <= target.tpot


@dataclass(slots=True)
class Outcome:
    """served: in the order of the trace, None for refused requests. waited: sequences times seconds. span: seconds in
    which requests arrived."""

    served: list[SimulatedShares | None]
    span: float
    seconds: float = 0.0
    waited: float = 0.0
    most_waiting: int = 0
    steps: int = 0
    counts: dict[str, int] = field(default_factory=dict)


class WholePrompts(Service):
    """Scheduling without chunked prefill: whole prompts in the order of arrival, while other sequences wait for their
    next token."""

    def order(self, running: list[Sequence], table: RequestTable | None, now: float) -> list[Sequence]:
        if table:
            table.moved.clear()
        return sorted([*running, *(table.waiting if table else ())], key=lambda seq: seq.order)

    def allowance(self, decodes: Decoding, wanting: Iterable[Sequence]) -> int:
        return max(self._whole, next(iter(wanting)).pending)


class World:
    """One run. `prompts` are the trace's prompts."""

    def __init__(self, trace: list[Asked], setup: Setup, prompts: Prompts | None = None):
        self.trace, self.setup = trace, setup
        self.prompts = prompts or Prompts(trace)
        self.now = 0.0
        self.truth = StepTime(setup.costs)
        self.adapters = SimulatedAdapters(setup.adapters, lambda: self.now)
        self.scheduler = self._make_scheduler()
        sampled = (self.prompts.answer_id,)
        self._results = [(RowResult(row), RowResult(row, sampled)) for row in range(setup.rows)]
        self.outcome = Outcome([None] * len(trace), trace[-1].at / setup.rate)
        self._due = 0  # index of the next request to come
        self._held: list[int] = []  # static: requests that arrived while a batch was computed

    def _make_scheduler(self) -> Scheduler:
        s, whole = self.setup, self.setup.policy != "ours"
        longest = max(a.prompt + a.answer for a in self.trace)
        group = CacheGroup(PagedKV(), (0,), bytes_per_block=1)
        capacity = Capacity(
            max_rows=s.rows,
            max_tokens_per_step=s.step_tokens + longest + s.rows if whole else s.step_tokens,
            max_model_len=longest,
            block_size=s.block_size,
            groups=(group,),
            num_blocks=(s.memory // s.block_size + 1,),
            vocab_size=self.prompts.vocab_size,
        )
        targets = {c: s.target for c in ServiceClass}
        service = WholePrompts(targets, s.step_tokens, s.block_size, capacity.max_tokens_per_step) if whole else None
        return Scheduler(
            capacity,
            bidirectional=whole,
            max_waiting=s.max_waiting,
            targets=targets,
            clock=lambda: self.now,
            service=service,
            adapters=self.adapters.pool,
        )

    def run(self, progress: Progress = lambda done: None) -> Outcome:
        """Runs until all requests have ended. progress: called with the number of ended requests."""
        ended = 0
        while self._due < len(self.trace) or self._held or self.scheduler.has_work():
            self._receive()
            before = self.scheduler.finished
            self._step()
            if self.scheduler.finished != before:
                ended += self.scheduler.finished - before
                progress(ended)
        return self._finish()

    # -- arrivals ----------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        if not (self._held or self.scheduler.has_work()):
            self.now = max(self.now, self._when(self._due))
        while self._due < len(self.trace) and self._when(self._due) <= self.now:
            if self.setup.policy == "static":
                self._hold(self._due)
            else:
                self._add(self._due)
            self._due += 1
        if self._held and not self.scheduler.has_work():
            self._batch()

    def _when(self, index: int) -> float:
        return self.trace[index].at / self.setup.rate

    def _hold(self, index: int) -> None:
        if len(self._held) < self.setup.max_waiting:
            self._held.append(index)

    def _batch(self) -> None:
        """Starts the first requests in the queue, as many as fit into rows and memory: they begin together, and the
        next batch begins when all of them have ended. The output lengths are known in advance here, which favors this
        policy."""
        size, room = 0, self.scheduler.kv.total
        for index in self._held[: self.setup.rows]:
            room -= -(-(self.trace[index].prompt + self.trace[index].answer) // self.setup.block_size)
            if size and room < 0:
                break
            size += 1
        chosen, self._held = self._held[:size], self._held[size:]
        for index in chosen:
            self._add(index)

    def _add(self, index: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=self.trace[index].answer, ignore_eos=True, seed=0)
        try:
            ids, adapters = self.prompts.ids(index), self.adapters.of(index)
            self.scheduler.add(Request(str(index), ids, params, adapters=adapters))
        except QueueFull:
            return
        self.outcome.served[index] = SimulatedShares(self._when(index))

    # -- steps -------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        scheduler, outcome = self.scheduler, self.outcome
        self.adapters.arrive()
        assert not scheduler.take_adapters(), "adapters that cannot be used"
        plan = scheduler.plan()
        if plan is None:
            return self._wait()
        waiting = len(scheduler.waiting) + len(self._held)
        seconds = predict(self.truth, load_of(plan)) if plan.computes else 0.0
        self.now += seconds
        outcome.waited += waiting * seconds
        outcome.most_waiting = max(outcome.most_waiting, waiting)
        outcome.steps += 1
        if plan.computes:
            scheduler.service.observe(plan, seconds)
        for delta in each_delta(scheduler.commit(plan, self._result(plan))):
            self._note(delta)

    def _wait(self) -> None:
        """All requests wait for adapters: passes the time until one is loaded, or the next request comes."""
        due = self._when(self._due) if self._due < len(self.trace) else math.inf
        then = min(self.adapters.next_end, due)
        assert then < math.inf, "no request can be scheduled, and none is running"
        waiting, before, self.now = len(self.scheduler.waiting), self.now, max(self.now, then)
        self.outcome.waited += waiting * (self.now - before)

    def _result(self, plan: StepPlan) -> StepResult:
        rows = tuple(self._results[w.row][w.sample] for w in plan.work)
        return StepResult(plan.step, rows, decoded=pack_ids([self.prompts.answer_id] * len(plan.decodes)))

    def _note(self, delta: Delta) -> None:
        served = self.outcome.served[int(delta.id)]
        assert served is not None and delta.error is None, delta.error
        served.take(delta, self.now)

    def _finish(self) -> Outcome:
        s, outcome = self.scheduler, self.outcome
        s.check()
        outcome.seconds = self.now
        outcome.counts = {
            "preemptions": s.preemptions,
            "prompt_tokens": s.prompt_tokens,
            "generated_tokens": s.generated_tokens,
            "looked_up_tokens": s.planner.looked_up_tokens,
            "cached_tokens": s.cached_tokens,
            "evicted_blocks": s.kv.tree.stats().evicted,
            "loads": s.adapters.loads,
            "unloads": s.adapters.evictions,
        }
        return outcome
