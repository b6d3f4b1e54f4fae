"""The runner over an executor written for these tests: which works are computed, and what becomes of their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from kvasir.caches import PagedKV
from kvasir.plan import (
    CacheGroup,
    Capacity,
    Decodes,
    Join,
    RowResult,
    SamplingSpec,
    StepPlan,
    Work,
    pack_ids,
    unpack_ids,
)
from kvasir.runner.executor import ExecutorStep, Taken
from kvasir.runner.rows import BROKEN
from kvasir.runner.runner import Runner
from kvasir.types import ModelInfo

CAPACITY = Capacity(6, 64, 100, 16, (CacheGroup(PagedKV(1, 4), (0,), 512),), (8,), vocab_size=50)
INFO = ModelInfo("m", "m", ("generate",), 50, 100)
NEXT = StepPlan(1)
BAD = 13  # a row that knows this id cannot be sampled


class Handle:
    """Samples the sum of the known ids, or with a mask the mask's first byte."""

    def __init__(self, rows, step: ExecutorStep):
        self.rows, self.step = rows, step
        self.begun: list = []

    def wait(self) -> float:
        return 0.25

    def decoded(self) -> tuple[np.ndarray, Mapping[int, str]]:
        rows = unpack_ids(self.step.decodes.rows)
        found = [self._sampled(row, None) for row in rows]
        tokens = np.array([taken.tokens[0] if taken.tokens else 0 for taken in found], np.int32)
        return tokens, {place: taken.error for place, taken in enumerate(found) if taken.error}

    def taken(self) -> Sequence[Taken]:
        return [self._sampled(self.step.works[at].row, None) for at in self.step.now]

    def begin(self, at, masks) -> bool:
        self.begun.append((list(at), list(masks)))
        return not any(self.step.works[i].drafted for i in at)

    def take(self, at, masks) -> Sequence[Taken]:
        return [self._sampled(self.step.works[i].row, mask) for i, mask in zip(at, masks, strict=True)]

    def _sampled(self, row: int, mask: bytes | None) -> Taken:
        ids = self.rows[row].ids[: self.rows[row].known]
        if BAD in ids:
            return Taken(error="NaN")
        return Taken((mask[0] if mask else int(ids.sum()) % 50,), (), b"carry")

    def read(self, at: int):
        first, end = self.step.works[at].read
        ids, _ = self.rows[self.step.works[at].row].read(first, end)
        return ((), "NaN") if BAD in ids else (tuple((id, -1.0, 0, ()) for id in ids), "")

    def pooled(self, at: int) -> bytes:
        return b"pooled"

    def hidden(self, at: int, name: str) -> bytes:
        return name.encode()

    def saved(self):
        return tuple(b"block" for _ in self.step.plan.saves)


class Executor:
    computes = frozenset(("drafted",))
    hidden = frozenset(("last",))
    cache, overlaps, grows = "the cache", True, ()

    def __init__(self, columns: bool = False, queues: bool = False):
        self.columns, self.queues = columns, queues
        self.steps: list[ExecutorStep] = []
        self.calls: list[str] = []

    def bind(self, rows) -> None:
        self.rows = rows

    def enter(self, join: Join, row) -> None:
        if join.spec.seed == 13:
            raise ValueError("an unlucky seed")

    def settle(self) -> None:
        self.calls.append("settle")

    def start(self, step: ExecutorStep) -> Handle:
        self.steps.append(step)
        return Handle(self.rows, step)

    def set_adapter(self, adapter: int, pairs) -> None:
        if adapter < 1:
            raise ValueError("below 1")

    def close(self) -> None:
        self.calls.append("close")


def made(**options) -> tuple[Runner, Executor]:
    executor = Executor(**options)
    return Runner(executor, CAPACITY, INFO), executor


def join(row: int, ids, **more) -> Join:
    return Join(row, pack_ids(ids), len(ids), more.pop("spec", SamplingSpec()), **more)


def step(runner: Runner, masks: Mapping[int, bytes] = {}, **plan):
    return runner.sample(runner.execute(StepPlan(0, **plan)), masks)


def test_the_runner_shows_what_its_executor_computes():
    runner, executor = made()
    assert runner.capacity.computes == () and runner.cache == "the cache" and runner.overlaps
    assert runner.executor is executor and runner.info is INFO
    runner.close()
    assert executor.calls == ["close"]


def test_a_sampled_id_is_known_to_the_next_step():
    runner, _ = made()
    (row,) = step(runner, joined=(join(0, [1, 2]),), work=(Work(0, 0, 2, sample=True),)).rows
    assert row.tokens == (3,) and row.carry == b"carry"
    (row,) = step(runner, work=(Work(0, 2, 1, sample=True),)).rows
    assert row.tokens == (6,)
    assert runner.rows[0].ids[:4].tolist() == [1, 2, 3, 6]
    assert runner.kernel_seconds == 0.5


def test_work_that_does_not_sample_only_fills_the_cache():
    runner, executor = made()
    (row,) = step(runner, joined=(join(0, [1, 2, 3]),), work=(Work(0, 0, 2),)).rows
    assert row == RowResult(0) and not executor.steps[0].now and not executor.steps[0].later


def test_work_beyond_the_known_ids_fails_an_assertion():
    runner, _ = made()
    with pytest.raises(AssertionError):
        runner.execute(StepPlan(0, joined=(join(0, [1, 2]),), work=(Work(0, 0, 3),)))


def test_the_step_says_where_token_rows_begin_and_when_works_are_sampled():
    runner, executor = made()
    guided, mirostat = SamplingSpec(guided=True), SamplingSpec(temperature=1.0, mirostat=2)
    specs = dict.fromkeys(range(4), SamplingSpec()) | {4: guided, 5: mirostat}
    joined = tuple(join(row, [row + 1] * 5, spec=spec) for row, spec in specs.items())
    works = (
        Work(0, 0, 5, sample=True),
        Work(1, 0, 3),
        Work(2, 0, 5, sample=True, masked=True),
        *(Work(row, 0, 6, appended=pack_ids([7]), drafted=1, sample=True) for row in (3, 4, 5)),
    )
    step(runner, joined=joined, work=works)
    (made_step,) = executor.steps
    assert made_step.starts == [0, 5, 8, 13, 19, 25, 31] and made_step.works == list(works)
    assert made_step.now == [0, 3] and made_step.later == [2, 4, 5]


def test_a_mask_that_comes_after_all_is_sampled_with():
    runner, _ = made()
    joined = join(0, [1, 2]), join(1, [3])
    plan = {"joined": joined, "work": (Work(0, 0, 2, sample=True), Work(1, 0, 1, sample=True))}
    assert [row.tokens for row in step(runner, {1: b"\x09"}, **plan).rows] == [(3,), (9,)]


def test_a_row_that_fails_is_refused_until_it_leaves():
    runner, executor = made()
    joined = join(0, [BAD]), join(1, [5])
    rows = step(runner, joined=joined, work=(Work(0, 0, 1, sample=True), Work(1, 0, 1, sample=True))).rows
    assert rows[0] == RowResult(0, error="NaN") and rows[1].tokens == (5,)
    rows = step(runner, work=(Work(0, 0, 1, sample=True), Work(1, 1, 1, sample=True))).rows
    assert rows[0] == RowResult(0, error=BROKEN) and rows[1].tokens == (10,)
    assert [work.row for work in executor.steps[1].works] == [1], "only sound rows are computed"
    (row,) = step(runner, left=(0,), joined=(join(0, [4]),), work=(Work(0, 0, 1, sample=True),)).rows
    assert row.tokens == (4,)


def test_results_keep_the_order_of_the_plan_around_faults():
    runner, _ = made()
    joined = tuple(join(row, [row + 1]) for row in range(4))
    works = tuple(Work(row, 0, 1, pending=(1,) if row % 2 else (), sample=True) for row in range(4))
    rows = step(runner, joined=joined, work=works).rows
    assert [row.row for row in rows] == [0, 1, 2, 3]
    assert [bool(row.error) for row in rows] == [False, True, False, True]
    assert "Work.pending" in rows[1].error and rows[2].tokens == (3,)


def test_an_output_that_the_executor_lacks_is_named():
    runner, _ = made()
    work = Work(0, 0, 1, want_hidden=("last", "layers.3"))
    (row,) = step(runner, joined=(join(0, [1]),), work=(work,)).rows
    assert "layers.3" in row.error and not row.hidden


def test_results_beyond_a_token():
    runner, _ = made()
    joined = tuple(join(row, ids) for row, ids in enumerate([[1, 2, 3], [4, 5], [6, BAD, 7]]))
    works = (
        Work(0, 0, 3, sample=True, read=(0, 2), want_hidden=("last",)),
        Work(1, 0, 2, want_pooled="embed"),
        Work(2, 0, 2, read=(0, 1)),
    )
    result = step(runner, joined=joined, work=works, saves=((0, 1), (0, 2)))
    both, pooled, failed = result.rows
    assert [entry[0] for entry in both.read] == [2, 3] and both.hidden == (("last", b"last"),) and both.tokens == (6,)
    assert pooled.pooled == b"pooled" and not pooled.tokens
    assert failed.error == "NaN" and runner.rows[2].fault == BROKEN
    assert result.saved == (b"block", b"block")


@pytest.mark.parametrize("columns", [False, True])
def test_columns_have_the_results_of_works(columns):
    """Whether the executor takes columns or each becomes a work; one of them fails."""
    runner, executor = made(columns=columns)
    joined = tuple(join(row, ids) for row, ids in enumerate([[1, 2], [3, BAD], [4]]))
    decodes = Decodes(pack_ids([2, 1]), pack_ids([0, 1]))
    plan = StepPlan(0, joined=joined, work=(Work(0, 0, 2, sample=True),), decodes=decodes)
    result = runner.sample(runner.execute(plan))
    assert unpack_ids(result.decoded) == [4, -1] and result.failed == (RowResult(1, error="NaN"),)
    assert [row.tokens for row in result.of(plan)] == [(4,), (), (3,)]
    assert bool(executor.steps[0].decodes) == columns
    assert runner.rows[2].ids[: runner.rows[2].known].tolist() == [4, 4] and runner.rows[1].fault == BROKEN


def test_columns_of_a_broken_row_become_works():
    runner, executor = made(columns=True)
    step(runner, joined=(join(0, [BAD]), join(1, [5])), work=(Work(0, 0, 1, sample=True),))
    result = step(runner, decodes=Decodes(pack_ids([0, 1]), pack_ids([0, 0])))
    assert unpack_ids(result.decoded) == [-1, 5] and result.failed == (RowResult(0, error=BROKEN),)
    assert not executor.steps[-1].decodes


def test_a_spec_that_the_executor_cannot_sample_with_starts_no_step():
    runner, executor = made()
    with pytest.raises(ValueError, match="seed"):
        runner.execute(StepPlan(0, joined=(join(0, [1], spec=SamplingSpec(seed=13)),), work=(Work(0, 0, 1),)))
    assert not executor.steps


def test_a_result_that_comes_after_its_sequence_left_is_not_written_to_the_row():
    runner, _ = made(queues=True)
    pending = runner.execute(StepPlan(0, joined=(join(0, [1, 2]),), work=(Work(0, 0, 2, sample=True),)))
    later = runner.execute(StepPlan(1, left=(0,), joined=(join(0, [7]),), work=(Work(0, 0, 1, sample=True),)))
    runner.sample(pending)
    assert runner.rows[0].ids[: runner.rows[0].known].tolist() == [7]
    (row,) = runner.sample(later).rows
    assert row.tokens == (7,)


@pytest.mark.parametrize(
    ("queues", "work", "spec", "follows"),
    [
        (False, {}, {}, False),
        (True, {}, {}, True),
        (True, {"masked": True}, {}, False),
        (True, {}, {"guided": True}, False),
    ],
    ids=["waits", "queues", "masked", "guided"],
)
def test_a_step_follows_only_what_no_mask_can_change(queues, work, spec, follows):
    runner, executor = made(queues=queues)
    assert not runner.follows(NEXT)
    joined = (join(0, [1, 2], spec=SamplingSpec(**spec)),)
    pending = runner.execute(StepPlan(0, joined=joined, work=(Work(0, 0, 2, sample=True, **work),)))
    assert runner.follows(NEXT) == follows
    runner.sample(pending)
    assert not runner.follows(NEXT) and executor.calls == ["settle"]


@pytest.mark.parametrize(
    ("given", "begun"), [({0: b"\x05"}, [([1, 0], [None, b"\x05"])]), ({}, [([1], [None])])], ids=["both", "one"]
)
def test_a_step_follows_once_sampling_with_its_masks_has_begun(given, begun):
    """Row 0 is sampled with the forward and gets a mask after all, row 1 waits for one."""
    runner, executor = made(queues=True)
    joined = (join(0, [1, 2], spec=SamplingSpec(guided=True)), join(1, [3, 4], spec=SamplingSpec(guided=True)))
    works = Work(0, 0, 2, sample=True), Work(1, 0, 2, sample=True, masked=True)
    pending = runner.execute(StepPlan(0, joined=joined, work=works))
    assert not runner.follows(NEXT)
    assert runner.follows(NEXT, given) and runner.follows(NEXT) and pending.handle.begun == begun
    runner.execute(NEXT)
    assert executor.calls == ["settle"], "the next step waited"  # the first step's
    rows = runner.sample(pending, given).rows
    assert [row.tokens for row in rows] == [(given[0][0],) if given else (3,), (7,)]


def test_a_step_without_masks_after_all_follows_at_once():
    runner, _ = made(queues=True)
    joined = (join(0, [1, 2], spec=SamplingSpec(guided=True)),)
    pending = runner.execute(StepPlan(0, joined=joined, work=(Work(0, 0, 2, sample=True),)))
    assert runner.follows(NEXT, {}) and not pending.handle.begun


def test_ids_that_come_after_a_sampled_one_do_not_follow_it_unread():
    runner, _ = made(queues=True)
    pending = runner.execute(StepPlan(0, joined=(join(0, [1, 2]),), work=(Work(0, 0, 2, sample=True),)))
    forced = StepPlan(1, work=(Work(0, 2, 2, appended=pack_ids([9])),))
    assert runner.follows(NEXT, {}) and not runner.follows(forced, {})
    runner.sample(pending)


def test_the_work_of_a_row_does_not_follow_its_draft():
    runner, _ = made(queues=True)
    joined = (join(0, [1, 2]), join(1, [3]))
    runner.execute(StepPlan(0, joined=joined, work=(Work(0, 0, 3, sample=True, drafted=1, appended=pack_ids([4])),)))
    own, other = (StepPlan(1, work=(Work(row, start, 1, sample=True),)) for row, start in ((0, 3), (1, 0)))
    assert runner.follows(other, {}) and not runner.follows(own, {})


def test_an_adapter_is_known_once_the_executor_has_it():
    runner, _ = made()
    with pytest.raises(ValueError, match="below 1"):
        runner.set_adapter(0, {})
    runner.set_adapter(3, {})
    assert runner.rows.adapters == {0, 3}
    runner.set_adapter(3, None)
    assert runner.rows.adapters == {0}
