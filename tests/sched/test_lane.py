"""Rows that only decode, as columns: the same plans, results and answers as row by row."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.caches import CacheKind, Cross, PagedKV, State, Window
from kvasir.kv.blocks import SequenceBlocks
from kvasir.plan import StepPlan, StepResult, Work, pack_ids
from kvasir.runner.fake import FakeRunner
from kvasir.sched.budget import StepTime, predict
from kvasir.sched.counts import Counts
from kvasir.sched.scheduler import Scheduler
from kvasir.sched.sequence import Sequence
from kvasir.sched.service import load_of
from kvasir.types import Delta, FinishReason, Request, SamplingParams, ServiceClass, Tokens, each_delta
from tests.examples import examples
from tests.kv.chunked import Chunked
from tests.sched.drive import by_hand, request
from tests.sched.guides import HandGuides

VOCAB, LENGTH, EOS = 256, 96, (5, 77)
KINDS = (
    *((PagedKV(),), (Window(window=9),), (PagedKV(), Window(window=20)), (State(),), (Cross(length=10), PagedKV())),
    *((Chunked(chunk=8), State()), (PagedKV(), Window(window=1))),
)
COSTS = StepTime((1e-3, 2e-3, 1e-6, 0.01))


@dataclass
class Options:
    """Of a run."""

    kinds: tuple[CacheKind, ...] = (PagedKV(),)
    blocks: int = 200
    rows: int = 8
    step_tokens: int = 64
    max_chunk: int = 2**31
    overlaps: bool = False
    columns: bool = True  # whether the executor takes them
    lane: bool = True
    least: int = 1  # sequences in the lane


@dataclass
class Run:
    """A scheduler over a FakeRunner, driven as by EngineCore, with a record of its plans and deltas."""

    options: Options
    now: float = 0.0
    plans: list[tuple] = field(default_factory=list)
    deltas: list[list[Delta]] = field(default_factory=list)
    decoded: int = 0  # rows in columns

    def __post_init__(self) -> None:
        o = self.options
        self.runner = FakeRunner(
            vocab_size=VOCAB, num_blocks=o.blocks, block_size=4, max_rows=o.rows, max_tokens_per_step=o.step_tokens,
            max_model_len=LENGTH, kinds=o.kinds,
        )  # fmt: skip
        self.executor: Any = self.runner.executor
        self.executor.draws_columns = o.columns
        self.scheduler = Scheduler(
            self.runner.capacity, eos_ids=EOS, max_chunk=o.max_chunk, clock=lambda: self.now, guides=HandGuides(True)
        )
        self.scheduler.table.lane.least = o.least
        if not o.lane:
            self.scheduler.table.lane.offer = lambda seq: None
        self._ahead: StepPlan | None = None

    def step(self, fails: bool = False) -> None:
        """fails: the step that runs raises, and the one planned on it is taken back."""
        scheduler = self.scheduler
        reported: list = [*scheduler.expire(), *scheduler.enter_grammars()]
        plan = scheduler.plan()
        self.plans.append(self._seen(plan) if plan else ())
        before, self._ahead = self._ahead, None
        if before:
            reported += self._run(before, fails)
            if fails and plan:
                plan = scheduler.retract(plan)
        if plan and not self.options.overlaps:
            reported += self._run(plan, fails)
        else:
            self._ahead = plan
        self.deltas.append(sorted((_plain(d) for d in each_delta(reported)), key=lambda d: (d.id, d.index)))
        if self.options.lane:
            scheduler.check()
        self.now += 0.001

    def _run(self, plan: StepPlan, fails: bool) -> list[Delta | Tokens]:
        self.decoded += len(plan.decodes)
        pending = self.runner.execute(plan)
        result = self.runner.sample(pending, self.scheduler.masks(plan))
        if fails and plan.computes:
            return [*self.scheduler.fail(plan, "it fails")]
        self.now += predict(COSTS, load_of(plan))
        self.scheduler.service.observe(plan, predict(COSTS, load_of(plan)))
        return self.scheduler.commit(plan, result)

    def _seen(self, plan: StepPlan) -> tuple:
        """Who computes what, and how many blocks that takes; which rows and blocks these are has no meaning."""
        name = {s.row: (s.request.id, s.index) for s in self.scheduler.running}
        works = sorted(_of(name[w.row], w) for w in plan.works)
        joined = sorted((name[j.row], j.ids, j.carry) for j in plan.joined)
        return works, joined, len(plan.left), len(plan.copies), load_of(plan)

    @property
    def done(self) -> bool:
        return not self.scheduler.has_work() and self._ahead is None

    def find(self, id: str, index: int) -> Sequence | None:
        found = self.scheduler.table.requests.get(id, ())
        return next((s for s in found if s.index == index), None)


def _of(name: tuple[str, int], w: Work) -> tuple:
    blocks = [(group, len(ids)) for group, (_, ids) in enumerate(w.blocks) if ids]
    return name, w.start, w.count, blocks, w.appended, w.sample, w.masked, w.read


def _plain(delta: Delta) -> Delta:
    """Without what only the first delta of an answer has to say."""
    return replace(delta, cached_tokens=0)


def greedy(id: str, prompt: list[int]) -> Request:
    return request(id, prompt, temperature=0.0, max_tokens=20, ignore_eos=True)


def drawn_requests(chance: random.Random) -> Iterator[Request]:
    beginning = [chance.randrange(VOCAB) for _ in range(20)]
    for i in range(16):
        grammar = f"{chance.randrange(1000)} {chance.randrange(1, 30)}" if chance.random() < 0.15 else None
        params = SamplingParams(
            n=chance.choice([1, 1, 1, 2]),
            temperature=chance.choice([0.0, 0.0, 0.0, 1.0]),
            seed=i,
            max_tokens=chance.choice([1, 2, 9, 40, 60]),
            min_tokens=0 if grammar else chance.choice([0, 0, 1]),
            ignore_eos=chance.random() < 0.7,
            logprobs=1 if chance.random() < 0.15 else None,
            prompt_logprobs=0 if chance.random() < 0.1 else None,
            stop_token_ids=(*chance.sample(range(VOCAB), 20), VOCAB + 9) if chance.random() < 0.3 else (),
        )
        prompt = beginning[: chance.randrange(20)] + [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 20))]
        yield Request(
            f"r{i}", tuple(prompt), params, slo=chance.choice(list(ServiceClass)), tenant=chance.choice("ab"),
            deadline=chance.choice([0.1, 1.0]) if chance.random() < 0.1 else None, grammar=grammar,
        )  # fmt: skip


def compare(seed: int, plant: Callable[[Run], None] = lambda run: None) -> Run:
    """A random workload with the lane and without it."""
    chance = random.Random(seed)
    options = Options(
        kinds=chance.choice([(PagedKV(),), *KINDS]),
        blocks=chance.choice([26, 40, 60, 200]),
        rows=chance.choice([1, 3, 6, 12]),
        step_tokens=chance.choice([2, 5, 12, 64]),
        max_chunk=chance.choice([3, 2**31]),
        overlaps=chance.random() < 0.5,
        columns=chance.random() < 0.7,
        least=seed % 5 + 1 if seed % 2 else 1,
    )
    with_it, without = Run(options), Run(replace(options, lane=False))
    plant(with_it)
    todo = list(drawn_requests(chance))
    for _ in range(4000):
        if not todo and with_it.done and without.done:
            break
        drawn, target = chance.random(), (f"r{chance.randrange(16)}", chance.randrange(2))
        arrives, fails = todo and chance.random() < 0.3, chance.random() < 0.01
        if arrives:
            one = todo.pop()
        for run in (with_it, without):
            if arrives:
                run.scheduler.add(one)
            disturb(run, drawn, target)
            run.step(fails)
        assert with_it.plans[-1] == without.plans[-1], "another plan"
        assert with_it.deltas[-1] == without.deltas[-1], "other answers"
    assert with_it.done and without.done and not todo
    ends = (with_it.scheduler.generated_tokens, with_it.scheduler.prompt_tokens, with_it.scheduler.preemptions)
    assert ends == (without.scheduler.generated_tokens, without.scheduler.prompt_tokens, without.scheduler.preemptions)
    assert not without.decoded and not with_it.scheduler.table.lane
    return with_it


def disturb(run: Run, drawn: float, target: tuple[str, int]) -> None:
    seq = run.find(*target)
    if drawn < 0.02 and seq in run.scheduler.running:
        run.scheduler.preempt(seq)
    elif drawn < 0.03:
        run.scheduler.abort(*target)
    elif drawn < 0.05:
        run.scheduler.pause(target[0])
    elif drawn < 0.3 or not run.scheduler.has_work():
        for paused in list(run.scheduler.table.paused):
            run.scheduler.resume(paused.request.id)


@examples(20)
@given(st.integers(0, 2**32))
def test_with_and_without_the_lane_plans_and_answers_are_the_same(seed):
    compare(seed)


def test_the_lane_is_used():
    assert compare(2).decoded > 100


def late(run: Run) -> None:
    """Who leaves gets the counts with which it entered: a stale copy."""
    lane, before = run.scheduler.table.lane, dict[Sequence, tuple[int, int]]()
    offer, leave = lane.offer, lane.leave

    def entering(seq: Sequence) -> None:
        before[seq] = seq.counts.computed, seq.counts.stored
        offer(seq)

    def leaving(seq: Sequence) -> None:
        was_in = seq in lane
        leave(seq)
        if was_in:
            seq.counts.computed, seq.counts.stored = before[seq]

    lane.offer, lane.leave = entering, leaving


def forgotten(run: Run) -> None:
    """Who is preempted stays in the lane."""
    table = run.scheduler.table
    wait, leave = table.wait, table.lane.leave

    def waiting(seq: Sequence) -> None:
        table.lane.leave = lambda seq: None
        wait(seq)
        table.lane.leave = leave

    table.wait = waiting


def enter_with(run: Run, name: str, wrong: Callable[[SequenceBlocks, int], int]) -> None:
    """Sequences enter with a wrong fact about their blocks."""
    lane = run.scheduler.table.lane
    offer = lane.offer

    def entering(seq: Sequence) -> None:
        with patch.object(SequenceBlocks, name, wrong):
            offer(seq)

    lane.offer = entering


def roomy(run: Run) -> None:
    """Tables have room for one token more than they have."""
    room = SequenceBlocks.room
    enter_with(run, "room", lambda blocks, computed: room(blocks, computed) + 1)


def grasping(run: Run) -> None:
    """Blocks that a window has passed are kept."""
    enter_with(run, "next_trim", lambda blocks, stored: LENGTH)


def endless(run: Run) -> None:
    """A stop id is a token like others."""
    lane = run.scheduler.table.lane
    odd = lane.odd
    lane.odd = lambda members, tokens: [p for p in odd(members, tokens) if members.sequences[p] not in lane]


def lenient(run: Run) -> None:
    """Rows enter whose log-probabilities are wanted."""
    lane = run.scheduler.table.lane
    offer = lane.offer

    def entering(seq: Sequence) -> None:
        wanted, seq.emission.holds_back = seq.emission.holds_back, False
        offer(seq)
        seq.emission.holds_back = wanted

    lane.offer = entering


PLANTS = [(late, 1), (forgotten, 3), (roomy, 0), (grasping, 0), (endless, 14), (lenient, 0)]


@pytest.mark.parametrize(("plant", "first"), PLANTS)
def test_a_planted_fault_is_found(plant, first):
    """first: the workload that finds it, or one before that."""
    with pytest.raises((AssertionError, AttributeError, KeyError)):
        for seed in range(first, first + 40):
            compare(seed, plant)


def test_a_count_that_is_changed_in_the_lane_is_found():
    run = Run(Options())
    run.scheduler.add(greedy("a", [1, 2]))
    while not run.scheduler.table.lane:
        run.step()
    [seq] = run.scheduler.running
    assert (seq.counts.known, seq.counts.computed, seq.counts.in_flight) == (len(seq.tokens), len(seq.tokens) - 1, 0)
    with pytest.raises(AttributeError):
        seq.counts.known += 1
    seq.counts = Counts(seq.counts.known + 1)
    with pytest.raises(AssertionError, match="two places"):
        run.scheduler.check()


def test_a_plan_and_its_works_have_equal_results():
    """Columns say what as many works say."""
    asked = [greedy(f"r{i}", [i, 2, 3]) for i in range(5)]
    runs = [Run(Options(columns=columns)) for columns in (True, False)]
    results: list[list[StepResult]] = [[], []]
    for run, kept in zip(runs, results, strict=True):
        sample = run.runner.sample
        run.runner.sample = lambda *args, sample=sample, kept=kept: kept.append(sample(*args)) or kept[-1]
        for one in asked:
            run.scheduler.add(one)
        while not run.done:
            run.step()
    assert results[0] == results[1] and runs[0].decoded == runs[1].decoded > 50
    tokens = [d.token_ids[0] for deltas in runs[0].deltas for d in deltas if d.id == "r3"]
    assert [tokens] == by_hand(asked[3], VOCAB, LENGTH, frozenset(EOS))


def test_rows_that_fail_alone():
    run = Run(Options())
    for i in range(3):
        run.scheduler.add(greedy(f"r{i}", [i, 2, 3]))
    draw = run.executor.draw_all
    run.executor.draw_all = lambda decodes: (draw(decodes)[0], {1: "this row"} if len(decodes) == 3 else {})
    while not run.done:
        run.step()
    ends = [d for deltas in run.deltas for d in deltas if d.finish_reason]
    assert sorted((d.finish_reason, d.error) for d in ends) == [
        (FinishReason.ERROR, "this row"), (FinishReason.LENGTH, None), (FinishReason.LENGTH, None)
    ]  # fmt: skip


def test_tokens_stand_for_deltas():
    tokens = Tokens(("a", "b"), (0, 2), pack_ids([7, 9]), at=1.5)
    first = Delta("c", finish_reason=FinishReason.ABORT)
    assert each_delta([first, tokens]) == [first, Delta("a", 0, (7,)), Delta("b", 2, (9,))]
    assert [d.at for d in tokens.deltas()] == [1.5, 1.5]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_hundreds_of_workloads(part):
    for seed in range(part * 150, part * 150 + 150):
        compare(seed)
