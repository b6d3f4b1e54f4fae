"""Runner: carries out plans. It owns the rows, decides which works are computed, and makes the results; an executor
computes.

execute    applies the plan to the rows -> works of sound rows -> executor.start
sample     the executor's results, masked works included -> rows -> StepResult
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvasir.inputs import FEATURES
from kvasir.plan import Ahead, BlockSink, Capacity, Decodes, RowResult, StepPlan, StepResult, Work, pack_ids
from kvasir.runner.adapters import AdapterFiles, NoAdapters
from kvasir.runner.executor import Executor, ExecutorStep, Handle, Taken
from kvasir.runner.proposals import Proposer
from kvasir.runner.rows import REFUSED, Row, Rows
from kvasir.types import AdapterInfo, ModelInfo


@dataclass(slots=True)
class Pending:
    """A pending step. rows: of its works when it started, because the next step may give their places to other
    sequences before this one is sampled. faults: by place in the plan, of works that are not computed. expanded: number
    of the plan's first works that were columns. settled: whether its ids wait for no mask any more."""

    step: ExecutorStep
    handle: Handle
    rows: Sequence[Row]
    faults: Mapping[int, str]
    expanded: int
    settled: bool = False


class Runner:
    """Carries out plans with an executor. capacity, info: all that the scheduler and the front may know about it.
    proposer: guesses ids after a step (`Work.propose`). adapters: reads adapters for the executor."""

    def __init__(
        self,
        executor: Executor,
        capacity: Capacity,
        info: ModelInfo,
        proposer: Proposer | None = None,
        adapters: AdapterFiles | None = None,
    ):
        self.executor, self.proposer = executor, proposer
        computes = tuple(name for name in FEATURES if name in executor.computes)
        positions = proposer.positions if proposer else 0
        self.capacity = replace(capacity, computes=computes, proposes=positions, grows=executor.grows)
        self.info = info
        self.rows = Rows(capacity, executor.computes | ({"propose"} if proposer else set()))
        self._adapters = adapters or NoAdapters()
        self.kernel_seconds = 0.0
        self._under_way: Pending | None = None  # the last started step, until it is sampled
        executor.bind(self.rows)
        if proposer:
            proposer.bind(self.rows)

    @property
    def cache(self) -> Any:
        return self.executor.cache

    @property
    def overlaps(self) -> bool:
        return self.executor.overlaps

    @property
    def weights_read(self) -> tuple[int, float]:
        """Bytes of weights that were read from disk for steps, and the seconds that steps waited for those of this
        process."""
        stream = getattr(self.executor, "stream", None)
        return stream.read if stream else (0, 0.0)

    def read_adapter(self, path: str) -> AdapterInfo:
        """A description, without a name, of the adapter in a folder or file, checked against the model and for what the
        executor lacks. For any thread. Raises ModelFileError or UnsupportedModel."""
        return self._adapters.read(path)

    def pack_adapter(self, path: str, content: str) -> Any:
        """The matrices of the adapter at a path as `set_adapter` takes them, in memory of their own; `nbytes` is their
        size. Takes long; for any thread, also during a step. Raises ModelFileError if the content hash is another one,
        and as `read_adapter`."""
        return self._adapters.pack(path, content)

    def set_adapter(self, adapter: int, packed: Any) -> None:
        """Gives packed matrices to an adapter id, from the next step on; None removes the adapter. Quick; waits for a
        step in progress. Raises ValueError for an invalid id, slot or shape."""
        self.executor.settle()
        self.executor.set_adapter(adapter, packed)
        (self.rows.adapters.discard if packed is None else self.rows.adapters.add)(adapter)

    def watch(self, sink: BlockSink) -> None:
        """Names who takes the bytes of `Work.grows`: called on another thread, while a step runs and until the next one
        starts."""
        self.executor.watch(sink)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Waits for a step in progress and ends the threads. Idempotent."""
        self.executor.close()

    # -- a step

    def execute(self, plan: StepPlan) -> Pending:
        """Starts computing a plan. The plan is applied to the rows even if the step fails, here or in `sample`."""
        ahead = self.follows(plan)
        self._under_way = None
        if not ahead:
            self.executor.settle()  # the previous step still runs if its masks could not be made
        expanded = len(plan.decodes)
        if expanded and self._takes(plan.decodes):
            expanded = 0
        if expanded:
            plan = plan.expanded()
        self.rows.apply(plan)
        for join in plan.joined:
            self.executor.enter(join, self.rows[join.row])
            if self.proposer:
                self.proposer.enter(join.row)
        step, faults = self._step(plan, ahead)
        if self.proposer:
            self.proposer.begin(step)
        rows = [self.rows[work.row] for work in step.works]
        self._under_way = pending = Pending(step, self.executor.start(step), rows, faults, expanded)
        return pending

    def _takes(self, decodes: Decodes) -> bool:
        """Whether the executor computes the decodes as columns: if it can, and no earlier step of their rows failed."""
        return self.executor.columns and self.rows.sound(np.frombuffer(decodes.rows, np.int32))

    def follows(self, plan: StepPlan, masks: Mapping[int, bytes] | None = None) -> bool:
        """Whether the plan may be executed before the pending step is sampled: the executor passes the sampled ids on
        by itself, and no mask can still change them. masks: of the pending step, None if they are not known yet. An
        executor that queues steps then begins to sample with them; `sample` must get the same."""
        if not self.executor.queues or (under_way := self._under_way) is None:
            return False
        step = under_way.step
        if self.proposer and self.proposer.waits(step):
            return False  # it reads what the step has left, and guesses follow the ids that are not known here yet
        works = [step.works[at] for at in (*step.now, *step.later)]
        sampled = {work.row for work in works}
        if any(work.appended and work.row in sampled for work in plan.work):
            return False  # these ids come after one that is not known here yet
        drafted = {work.row for work in works if work.drafted}
        if drafted and any(work.row in drafted for work in plan.works):
            return False  # what of the draft is known is not known here yet
        if not under_way.settled:
            if masks is None:
                guided = any(under_way.rows[at].spec.guided for at in step.now)
                return not (step.later or guided)
            late = _late(step, masks)
            given = [masks.get(step.works[at].row) for at in late]
            under_way.settled = not late or under_way.handle.begin(late, given)
        return under_way.settled

    def _step(self, plan: StepPlan, ahead: bool) -> tuple[ExecutorStep, dict[int, str]]:
        """The executor's step, and faults by place in the plan. ahead: whether the rows' last ids may still be missing
        here."""
        works, starts, now, later, faults = [], [len(plan.decodes)], [], [], {}
        for place, work in enumerate(plan.work):
            row = self.rows[work.row]
            if not (row.fault or self.executor.hidden.issuperset(work.want_hidden)):
                row.fault = REFUSED.format(f"all of {', '.join(work.want_hidden)} (Work.want_hidden)")
            if row.fault:
                faults[place] = row.fault
                continue
            assert work.start + work.count <= row.known + ahead, "work on tokens after the last known one"
            if work.sample:
                # With a carry, positions are sampled one after another; after sampling, a row may lack its draft.
                apart = work.masked or (work.drafted and (row.spec.carries or row.spec.guided))
                (later if apart else now).append(len(works))
            works.append(work)
            starts.append(starts[-1] + work.count)
        return ExecutorStep(plan, works, starts, now, later), faults

    def sample(self, pending: Pending, masks: Mapping[int, bytes] = {}, ahead: Ahead | None = None) -> StepResult:
        """Waits for the step and returns its results. masks: by row. ahead: the masks of guesses. Raises what the step
        or the sampler raised."""
        step, handle = pending.step, pending.handle
        if pending is self._under_way:
            self._under_way = None
        self.kernel_seconds += handle.wait()
        taken = self._taken(step, handle, masks)
        results = [self._result(pending, at, taken.get(at)) for at in range(len(step.works))]
        decoded = self._decoded(step.plan.decodes, handle) if step.plan.decodes else None
        begun = time.perf_counter()
        if self.proposer:
            for at, ids in self.proposer.propose(step, ahead).items():
                results[at] = replace(results[at], proposed=ids)
            self.kernel_seconds += self.proposer.seconds
        proposing = time.perf_counter() - begun
        if pending.faults:
            results = self._with_faults(step.plan, results, pending.faults)
        rows, saved, tokens, failed = self._rows(pending, results, decoded)
        return StepResult(step.plan.step, rows, saved, tokens, failed, proposing)

    def _taken(self, step: ExecutorStep, handle: Handle, masks: Mapping[int, bytes]) -> dict[int, Taken]:
        """Sampled ids by place in the step. Works that were sampled with the forward, but then got a mask, are sampled
        again."""
        taken = dict(zip(step.now, handle.taken(), strict=True))
        if late := _late(step, masks):
            taken.update(zip(late, handle.take(late, [masks.get(step.works[at].row) for at in late]), strict=True))
        return taken

    # -- results

    def _rows(self, pending: Pending, results: Sequence[RowResult], decoded: tuple | None) -> tuple:
        """The fields of a StepResult: results of the plan's columns are returned as columns."""
        saved = pending.handle.saved()
        if decoded is not None:
            return tuple(results), saved, *decoded
        if not pending.expanded:
            return tuple(results), saved, b"", ()
        columns, rest = results[: pending.expanded], results[pending.expanded :]
        tokens = pack_ids([-1 if row.error else row.tokens[0] for row in columns])
        return tuple(rest), saved, tokens, tuple(row for row in columns if row.error)

    def _decoded(self, decodes: Decodes, handle: Handle) -> tuple[bytes, tuple[RowResult, ...]]:
        rows, (found, errors) = np.frombuffer(decodes.rows, np.int32), handle.decoded()
        tokens = np.array(found, np.int32)
        tokens[list(errors)] = -1
        for place in errors:
            self.rows.break_(self.rows[int(rows[place])])
        sound = tokens >= 0
        self.rows.take(rows[sound], tokens[sound])
        return tokens.tobytes(), tuple(RowResult(int(rows[place]), error=error) for place, error in errors.items())

    def _result(self, pending: Pending, at: int, taken: Taken | None) -> RowResult:
        work, row = pending.step.works[at], pending.rows[at]
        if row.fault:  # the previous step failed after this one was started
            return RowResult(work.row, error=row.fault)
        wants_more = work.want_pooled or work.want_hidden or any(work.read)
        found = self._wanted(pending, at, taken) if wants_more else self._sampled(work, row, taken)
        if found.error:
            self.rows.break_(row)
        return found

    def _sampled(self, work: Work, row: Row, taken: Taken | None, read: tuple = (), hidden: tuple = ()) -> RowResult:
        if taken is None:
            return RowResult(work.row, read=read, hidden=hidden)
        tokens, logprobs, carry, error = taken
        if error:
            return RowResult(work.row, hidden=hidden, error=error)
        if self.rows.has(work.row, row):
            row.take(work, tokens, carry)
        return RowResult(work.row, tokens, logprobs, read, carry, b"", hidden, len(tokens) - 1)

    def _wanted(self, pending: Pending, at: int, taken: Taken | None) -> RowResult:
        """The result of work that wants more than a token."""
        work, handle = pending.step.works[at], pending.handle
        hidden = tuple((name, handle.hidden(at, name)) for name in work.want_hidden)
        if work.want_pooled:
            return RowResult(work.row, pooled=handle.pooled(at), hidden=hidden)
        read, error = handle.read(at) if any(work.read) else ((), "")
        if error:
            return RowResult(work.row, hidden=hidden, error=error)
        return self._sampled(work, pending.rows[at], taken, read, hidden)

    def _with_faults(self, plan: StepPlan, sound: Sequence[RowResult], faults: Mapping[int, str]) -> list[RowResult]:
        rest = iter(sound)
        return [
            RowResult(work.row, error=faults[place]) if place in faults else next(rest)
            for place, work in enumerate(plan.work)
        ]


def _late(step: ExecutorStep, masks: Mapping[int, bytes]) -> list[int]:
    """The places of works that are sampled with the masks."""
    return [*step.later, *(at for at in step.now if masks and step.works[at].row in masks)]
