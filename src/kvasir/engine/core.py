"""EngineCore: runs the engine's steps, ids in and ids out."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvasir.device import raise_fault
from kvasir.engine.look import MOST_STEPS, load_of, look, record
from kvasir.engine.prompt_progress import PromptProgress
from kvasir.engine.step_notes import StepNotes
from kvasir.kv.changes import CacheChanges, ChangeLog
from kvasir.plan import Ahead, BlockSink, Capacity, StepPlan, StepResult
from kvasir.sched.admission import PRIVATE
from kvasir.sched.drafts import StepTime
from kvasir.sched.scheduler import Scheduler
from kvasir.snapshot import Snapshot, StepRecord
from kvasir.statistics import EngineStats, by_adapter, counted
from kvasir.types import AdapterInfo, Delta, ModelInfo, Request, Tokens, each_delta

log = logging.getLogger("kvasir.engine")

CLOSE_BYTES = 64 << 20  # bytes that may be queued for writing to the tier before closing runs its next step
SEND_SECONDS = 1.0  # for blocks that other engines wait for, when closing
LINGER = 0.005  # seconds to wait for a tier if there is nothing else to do
LEARNT = 256  # ids from which the drafter learns at a time: below a third of a millisecond


class StepRunner(Protocol):
    """The runner as the core sees it: `execute` starts a forward, `sample` waits for it and returns its result.

    masks: for each row that may not sample every id, int32 words; bit i & 31 of word i >> 5 allows id i. They are
    computed during the forward. ahead: the masks of ids that are guessed, called before `sample` returns.
    overlaps: `execute` returns while the step is computed elsewhere, so the caller can do other work. follows: whether
    the next plan may be executed before the step in progress, with these masks, is sampled.
    """

    capacity: Capacity
    info: ModelInfo
    kernel_seconds: float

    @property
    def weights_read(self) -> tuple[int, float]: ...

    @property
    def overlaps(self) -> bool: ...

    def watch(self, sink: BlockSink) -> None: ...

    def follows(self, plan: StepPlan, masks: Mapping[int, bytes]) -> bool: ...

    def execute(self, plan: StepPlan) -> Any: ...

    def sample(self, pending: Any, masks: Mapping[int, bytes], ahead: Ahead | None) -> StepResult: ...

    def read_adapter(self, path: str) -> AdapterInfo: ...

    def pack_adapter(self, path: str, content: str) -> Any: ...

    def set_adapter(self, adapter: int, packed: Any) -> None: ...

    def close(self) -> None:
        """Waits for a step in progress and ends the threads; idempotent."""
        ...


@dataclass(slots=True)
class PendingStep:
    """A step that is started and not committed. begun: when it was launched. planned: when it was planned, if the
    engine had been idle; else 0. ahead: whether it was planned while another step was computed. pending: what the
    runner returned; error: what it raised. masks: once they are made."""

    plan: StepPlan
    begun: float
    planned: float = 0.0
    ahead: bool = False
    pending: Any = None
    error: Exception | None = None
    masks: Mapping[int, bytes] | None = None


class EngineCore:
    """Combines a scheduler and a runner. Not thread-safe: one thread calls it.

    If the runner overlaps, step N + 1 is planned while step N runs, and the results of step N are committed and
    delivered while step N + 1 runs:

        runner    | step N            | step N + 1            |
        core      | plan N + 1 | wait | commit N | plan N + 2 | ...

    If the runner passes the sampled ids of step N on by itself (`StepRunner.follows`), step N + 1 is started before the
    wait. The masks of step N are made while it runs, and the drafter learns from sequences that have ended.
    """

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        summary: Sequence[str] = (),
        warm: Callable[[], None] = lambda: None,
    ):
        """summary: lines for users that list the decisions and their reasons. warm: prepares, on another thread, what
        only some requests need."""
        self.warm = warm
        self.summary = tuple(summary)
        self.runner = runner
        self.scheduler = scheduler
        self.info = runner.info
        if scheduler.tiering.sendings and runner.capacity.grows:
            runner.watch(scheduler.tiering.sendings.arrived)
        self._dirty = False  # a step ran since the last check
        self.steps = self.computed_tokens = 0
        self.step_seconds = 0.0
        self._past: deque[StepRecord] = deque(maxlen=MOST_STEPS)
        self._notes: StepNotes | None = None  # once a request was traced
        self._progress: PromptProgress | None = None  # once a request asked for it
        self.plan_listener: Callable[[StepPlan], None] | None = None  # called with each plan before it runs
        self._pending_step: PendingStep | None = None  # the step in progress
        self._busy = False  # whether sequences ran after the last step
        self._ended = 0.0  # when the last step ended
        self._closed = False

    def add(self, request: Request) -> None:
        """Adds a request. Raises InvalidRequest or QueueFull, and then keeps no trace of it."""
        self.scheduler.add(request)
        if request.trace:
            self._notes = self._notes or StepNotes()
            self._notes.add(request)
        if request.progress:
            self._progress = self._progress or PromptProgress()
            self._progress.add(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends one or all choices of a request, without a delta. Unknown ids are ignored."""
        self.scheduler.abort(request_id, index)
        if index is None and self._notes:
            self._notes.forget(request_id)
        if index is None and self._progress:
            self._progress.forget(request_id)

    def pause(self, request_id: str, whether: bool) -> None:
        """Stops computing a request whose client reads too slowly, or resumes it."""
        (self.scheduler.pause if whether else self.scheduler.resume)(request_id)

    def pin_adapter(self, info: AdapterInfo) -> None:
        """Moves an adapter into memory, where it stays."""
        self.scheduler.adapters.pin(info.content, info.path, info.nbytes)

    def drop_adapter(self, content: str) -> None:
        """Ends the pin of an adapter, and removes it from memory once no request uses it."""
        self.scheduler.adapters.drop(content)

    def follow_cache(self, contents: bool = False) -> CacheChanges:
        """Reports what the prefix cache holds; from now on `cache_changes` reports what changes. contents: with what
        the blocks were computed from, of those that are computed from now on."""
        tree, numbers = self.scheduler.kv.tree, self.scheduler.prefixes.numbers
        if tree.log is None or (contents and not tree.log.contents):
            shares = lambda namespace: not namespace.startswith(PRIVATE)  # noqa: E731
            tree.log = ChangeLog(tree.block_size, numbers.pair, shares, contents)
        return tree.log.snapshot(tree.nodes())

    def cache_changes(self) -> CacheChanges | None:
        """What has changed in the prefix cache since the last call, if it is followed."""
        log = self.scheduler.kv.tree.log
        return log.take() if log else None

    def reset_prefix_cache(self) -> int:
        """Forgets all cached prefixes; see `Engine.reset_prefix_cache`. What a tier has saved stays there."""
        pools = self.scheduler.kv.pools
        before = sum(pool.free for pool in pools)
        self.scheduler.kv.tree.clear()
        return sum(pool.free for pool in pools) - before

    def expires(self) -> float | None:
        """Seconds until a deadline of a paused request, at which a step is due even if `has_work` is false; or None."""
        return self.scheduler.expires()

    @property
    def in_progress(self) -> bool:
        """Whether a step is started and not committed."""
        return self._pending_step is not None

    def has_work(self) -> bool:
        """Whether a step would do anything now. False if all remaining requests are paused."""
        return self.in_progress or self.scheduler.has_work() or self._learns

    @property
    def _learns(self) -> bool:
        drafter = self.scheduler.drafter
        return drafter is not None and drafter.learns

    def _learn(self) -> int:
        """Lets the drafter learn from some ids; returns how many."""
        drafter = self.scheduler.drafter
        return drafter.learn(LEARNT) if drafter else 0

    def step(self) -> list[Delta]:
        """`advance`, with a Delta for each choice."""
        return each_delta(self.advance())

    def advance(self) -> list[Delta | Tokens]:
        """Plans, computes and commits one step; returns what it adds, each choice once. A step that raises fails only
        the requests in it."""
        begun = time.perf_counter()
        scheduler = self.scheduler
        late: list[Delta | Tokens] = [*scheduler.expire(), *scheduler.enter_grammars(), *scheduler.take_adapters()]
        plan = self.scheduler.plan()
        running, self._pending_step = self._pending_step, None
        following = self._launch(plan) if running and plan and self._follows(running, plan) else None
        idle = plan is None and running is None
        learnt = self._learn() if running or idle or not self.runner.overlaps else 0
        before, result = self._wait(running)
        failed = isinstance(result, Exception)
        deltas = self._settle(before, result) if failed else []
        if failed and plan and before and before.leads:
            plan, following = self._retract(plan, following), None
        self._pending_step = following or self._launch(plan)
        if self._pending_step:
            self._pending_step.ahead = running is not None
            self._pending_step.planned = 0.0 if self._busy else begun
        if idle and not learnt:
            self.scheduler.linger(LINGER)
        if not failed:
            deltas = self._settle(before, result)
        if not self.runner.overlaps:
            deltas += self._finish()
        self._busy = bool(self.scheduler.running)
        self.step_seconds += time.perf_counter() - begun
        added = late + deltas if self._progress is None else self._progress.with_deltas(late + deltas)
        return self._notes.attached(added) if self._notes else added

    def _launch(self, plan: StepPlan | None) -> PendingStep | None:
        if plan is None:
            return None
        self._dirty = True
        if self.plan_listener:
            self.plan_listener(plan)
        begun = time.perf_counter()
        try:
            for adapter, content in plan.adapters:
                self.runner.set_adapter(adapter, self.scheduler.adapters.held(content))
            return PendingStep(plan, begun, pending=self.runner.execute(plan))
        except Exception as error:
            raise_fault(error)
            return PendingStep(plan, begun, error=error)

    def _follows(self, running: PendingStep, plan: StepPlan) -> bool:
        """Whether the plan may be launched before the running step is sampled."""
        if plan.adapters:
            return False  # they are installed between steps
        try:
            return running.error is None and self.runner.follows(plan, self._masks(running))
        except Exception as error:
            raise_fault(error)
            running.error = error
            return False

    def _masks(self, step: PendingStep) -> Mapping[int, bytes]:
        """The masks of a step, made once."""
        if step.masks is None:
            step.masks = self.scheduler.masks(step.plan)
        return step.masks

    def _retract(self, plan: StepPlan, pending_step: PendingStep | None) -> StepPlan:
        """Removes from a plan what builds on a failed step. If the plan was launched, its result is discarded, and the
        runner already knows which sequences joined and left."""
        rest = self.scheduler.retract(plan)
        return replace(rest, joined=(), left=()) if pending_step else rest

    def _finish(self) -> list[Delta | Tokens]:
        """Waits for the step in progress and commits it."""
        pending_step, self._pending_step = self._pending_step, None
        return self._settle(*self._wait(pending_step))

    def _wait(self, pending_step: PendingStep | None) -> tuple[StepPlan | None, StepResult | Exception | None]:
        """Waits for a step; returns its plan and its result or error."""
        if pending_step is None:
            return None, None
        try:
            result = pending_step.error or self._sample(pending_step)
            if pending_step.plan.computes:
                ended = time.perf_counter()
                seconds = ended - max(pending_step.begun, self._ended)
                period = ended - max(pending_step.planned, self._ended)
                proposing = 0.0 if isinstance(result, Exception) else result.proposing
                self.scheduler.observe(pending_step.plan, StepTime(seconds, period, proposing, pending_step.ahead))
                self._past.append(record(pending_step.plan, seconds))
                if self._progress:
                    plan = pending_step.plan
                    self._progress.step(self.scheduler.under_way[plan.step].pairs(plan), seconds)
                if self._notes:
                    self._notes.step(pending_step.plan, self._parts(pending_step.plan), seconds)
            return pending_step.plan, result
        except Exception as error:
            raise_fault(error)
            return pending_step.plan, error
        finally:
            self._ended = time.perf_counter()

    def _parts(self, plan: StepPlan) -> Iterator[tuple[str, int]]:
        """The request of each row of a step that is under way, and how many of its tokens are computed."""
        return ((seq.request.id, work.count) for seq, work in self.scheduler.under_way[plan.step].pairs(plan))

    def _sample(self, step: PendingStep) -> StepResult:
        return self.runner.sample(step.pending, self._masks(step), self.scheduler.ahead(step.plan))

    def _settle(self, plan: StepPlan | None, result: StepResult | Exception | None) -> list[Delta | Tokens]:
        if plan is None or result is None:
            return []
        if isinstance(result, Exception):
            log.error("step %d failed", plan.step, exc_info=result)
            return [*self.scheduler.fail(plan, f"{type(result).__name__}: {result}")]
        self.steps += 1
        self.computed_tokens += plan.num_tokens
        return self.scheduler.commit(plan, result)

    def check(self) -> None:
        """Checks the accounting of rows and blocks. Raises AssertionError."""
        self.scheduler.check()

    def rest(self) -> None:
        """Called whenever there is nothing to compute: checks once after each busy period. Raises AssertionError."""
        if self._dirty:
            self.check()
            self._dirty = False

    def close(self, seconds: float = 4.0) -> None:
        """Closes the core; idempotent. Waits for the step in progress, saves the contents of the prefix cache to the
        tier for at most `seconds`, sends what other engines wait for, and closes the runner even if that fails."""
        if self._closed:
            return
        self._closed = True
        try:
            self._finish()
            self._leave_to_tier(seconds)
        finally:
            if exchange := self.scheduler.tiering.exchange:
                exchange.close(SEND_SECONDS)
            self.scheduler.adapters.close()
            self.runner.close()

    def _leave_to_tier(self, seconds: float) -> None:
        store = self.scheduler.store
        if store is None:
            return
        deadline = time.monotonic() + seconds
        try:
            for plan in self.scheduler.last_plans():
                self._settle(*self._wait(self._launch(plan)))
                while store.tier.stats().queued_bytes > CLOSE_BYTES and time.monotonic() < deadline:
                    time.sleep(LINGER)
                if time.monotonic() >= deadline:
                    break
        finally:
            store.tier.close(max(0.0, deadline - time.monotonic()))

    def look(self) -> Snapshot:
        """A snapshot for monitoring. Takes some milliseconds, so it is made on request only."""
        return look(self.scheduler, self.stats(), self._past)

    @property
    def longest_step(self) -> float:
        """In seconds, among the recorded steps."""
        return max((step.seconds for step in self._past), default=0.0)

    def stats(self) -> EngineStats:
        """The current counters and gauges."""
        self.scheduler.kv.tree.expire(self.scheduler.clock())  # pins also expire while nothing is planned
        s, cache = self.scheduler, self.scheduler.kv.tree.stats()
        tier = s.store.tier.stats() if s.store else None
        sent = s.tiering.exchange.outbox.stats if s.tiering.exchange else None
        return EngineStats(
            **counted(self, s, s.planner),
            running=len(s.running),
            waiting=len(s.waiting),
            paused=len(s.table.paused),
            blocks_total=s.kv.total,
            blocks_used=s.kv.used,
            blocks_cached=cache.idle,
            block_size=s.capacity.block_size,
            adapters_resident=s.adapters.resident,
            adapters_bytes=s.adapters.resident_bytes,
            adapters_running=by_adapter(a.name for seq in s.running for a in seq.content.adapters),
            adapters_waiting=by_adapter(a.name for seq in s.waiting for a in seq.content.adapters),
            adapters_loads=s.adapters.loads,
            adapters_evictions=s.adapters.evictions,
            adapters_load_seconds=s.adapters.load_seconds.copy(),
            draft_seconds_saved=s.draft_seconds_saved,
            kernel_seconds=self.runner.kernel_seconds,
            weights_read_bytes=self.runner.weights_read[0],
            weights_wait_seconds=self.runner.weights_read[1],
            **load_of(s),
            evicted_blocks=cache.evicted,
            classes=s.class_stats(),
            tier_loaded_tokens=s.loaded_tokens,
            tier_loads={**tier.loads, **s.store.unused} if tier and s.store else {},
            tier_saves=tier.saves if tier else {},
            tier_bytes_loaded=tier.bytes_loaded if tier else 0,
            tier_bytes_saved=tier.bytes_saved if tier else 0,
            tier_bytes=tier.num_bytes if tier else 0,
            tier_queued_bytes=tier.queued_bytes if tier else 0,
            tier_evicted=tier.evicted if tier else 0,
            blocks_sent=dict(sent.parts) if sent else {},
            blocks_sent_bytes=sent.bytes_sent if sent else 0,
            tier_unused=s.store.unused if s.store else {},
            tiers=s.store.tier.each() if s.store else {},
        )
