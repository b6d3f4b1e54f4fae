"""No request starves under a small step budget: running sequences take turns, and prompts have a share."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.runner.fake import FakeRunner
from kvasir.sched.budget import STARVED_STEPS
from kvasir.sched.scheduler import Scheduler
from kvasir.types import Request, SamplingParams, ServiceClass
from tests.examples import examples
from tests.sched.drive import Drive, by_hand, request
from tests.sched.guides import HandGuides


def make(budget: int, rows: int, ahead: bool = False, max_chunk: int = 2**31, **options) -> Drive:
    runner = FakeRunner(max_rows=rows, max_tokens_per_step=budget, max_model_len=1024, num_blocks=512, **options)
    guides = HandGuides(at_once=True)
    return Drive(Scheduler(runner.capacity, max_chunk=max_chunk, guides=guides), runner, ahead)


def test_rows_take_turns_in_a_budget_of_half_of_them():
    drive = make(budget=4, rows=8)
    for i in range(8):
        drive.scheduler.add(request(f"r{i}", [i + 1, i + 2], max_tokens=200))
    while len(drive.scheduler.running) < 8:
        drive.step()
        assert len(drive.plans) < 50, "not all have a row"
    before = [len(drive.tokens[f"r{i}", 0]) for i in range(8)]
    for _ in range(150):
        drive.step()
    gained = [len(drive.tokens[f"r{i}", 0]) - n for i, n in enumerate(before)]
    assert all(abs(n - 150 * 4 // 8) <= 1 for n in gained), gained


def test_a_prompt_has_its_share_of_a_budget_that_decodes_could_use_up():
    drive = make(budget=8, rows=9)
    for i in range(8):
        drive.scheduler.add(request(f"r{i}", [i + 1, i + 2], max_tokens=500))
    while any(not drive.tokens[f"r{i}", 0] for i in range(8)):
        drive.step()
    drive.scheduler.add(request("new", list(range(1, 41)), max_tokens=20))
    steps = 0
    while not drive.tokens["new", 0]:
        drive.step()
        steps += 1
        assert steps <= 380, "the new request has no token"
    assert steps <= STARVED_STEPS * (40 // 8 + 1)


def test_a_share_that_no_prompt_can_use_goes_to_decodes():
    """The waiting one finds no blocks: meanwhile no step computes less than it holds."""
    runner = FakeRunner(max_rows=3, max_tokens_per_step=2, max_model_len=512, num_blocks=17, block_size=16)
    drive = Drive(Scheduler(runner.capacity), runner)
    for i in range(2):
        drive.scheduler.add(request(f"r{i}", [i + 1, i + 2], max_tokens=150))
    for _ in range(20):
        drive.step()
    drive.scheduler.add(request("big", list(range(1, 220)), max_tokens=1))
    for _ in range(60):
        before = len(drive.plans)
        drive.step()
        assert [p.num_tokens for p in drive.plans[before:]] == [2]
        assert [seq.request.id for seq in drive.scheduler.waiting] == ["big"]


class Watch:
    """Since when each living answer has waited for a step that computes some of it. `pieces`: tokens that are computed
    other than one by one: prompts, and what grammars force."""

    def __init__(self, drive: Drive, rows: int, budget: int, chunk: int, pieces: int):
        self.drive = drive
        self.turn = 2 * -(-rows // budget) + STARVED_STEPS
        self.bound = self.turn + STARVED_STEPS * (pieces // min(budget, chunk, 16) + 2 * rows)
        self.waits: Counter[tuple[str, int]] = Counter()

    def step(self) -> None:
        scheduler = self.drive.scheduler
        before = {(s.request.id, s.index): s.counts.computed for s in scheduler.table.all()}
        decodes = {(s.request.id, s.index) for s in scheduler.running if s.pending == 1}
        self.drive.step()
        after = {(s.request.id, s.index): s.counts.computed for s in scheduler.table.all()}
        self.waits = Counter({k: self.waits[k] + 1 for k in before if after.get(k) == before[k]})
        for key, steps in self.waits.items():
            assert steps <= (self.turn if key in decodes else self.bound), (key, steps)


@pytest.mark.parametrize("ahead", [False, True])
@examples(20)
@given(st.integers(0, 2**32))
def test_under_any_budget_everyone_comes_on_in_bounded_steps(ahead, seed):
    draw = random.Random(seed)
    rows, chunk = draw.randint(2, 10), draw.choice([1, 3, 2**31])
    budget = draw.randint(1, rows + 2)
    drive = make(budget, rows, ahead, chunk, window=draw.choice([0, 20, (0, 2)]))
    later = requests = [
        Request(
            f"r{i}",
            tuple(draw.randrange(256) for _ in range(draw.randint(1, 12))),
            SamplingParams(temperature=0.0, max_tokens=draw.choice([7, 100, 250]), seed=i, ignore_eos=True),
            slo=draw.choice(list(ServiceClass)),
            grammar=draw.choice([None, None, None, "11 30"]),
        )
        for i in range(rows)
    ]
    watch = Watch(drive, rows, budget, chunk, sum(len(r.prompt_ids) + 30 * bool(r.grammar) for r in requests))
    while later or drive.scheduler.has_work():
        if later and (not drive.scheduler.has_work() or draw.random() < 0.3):
            drive.scheduler.add(later[0])
            later = later[1:]
        watch.step()
    for r in requests:
        assert [drive.tokens[r.id, 0]] == by_hand(r, 256, 1024), r
    drive.scheduler.check()


def test_prompts_that_keep_coming_leave_answers_their_turns():
    """One token a step: three of four are for answers, though prompts never end."""
    drive = make(budget=1, rows=6)
    drive.scheduler.add(request("first", [1, 2], max_tokens=100, ignore_eos=True))
    while not drive.tokens["first", 0]:
        drive.step()
    for i in range(5):
        drive.scheduler.add(request(f"long{i}", [i] * 200, max_tokens=1))
    for _ in range(40):
        drive.step()
    assert len(drive.tokens["first", 0]) >= 25
