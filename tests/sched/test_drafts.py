"""Drafts change how many tokens a step brings, and nothing else."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.errors import ConfigError, KvasirError
from kvasir.runner.fake import FakeRunner
from kvasir.sched.drafts import Asked
from kvasir.sched.scheduler import Scheduler
from kvasir.sched.sequence import Sequence
from kvasir.spec.drafter import Speculator
from kvasir.types import Request
from tests.examples import examples
from tests.sched.drive import Drive, by_hand, request
from tests.sched.guides import HandGuide, HandGuides
from tests.sched.one_by_one import OneByOne

VOCAB, LENGTH = 256, 512


class Answers(OneByOne):
    """Drafts what will come, but for those `wrong` says no to: theirs is another id."""

    def __init__(self, most: int = 99, wrong=lambda: False, waits: bool = True):
        self.most, self.wrong, self._waits = most, wrong, waits

    def waits(self, sequences: Seq[Sequence]) -> bool:
        return self._waits

    def guess(self, seq: Sequence, most: int) -> list[int]:
        [answer] = by_hand(seq.request, VOCAB, LENGTH, which=(seq.index,))
        coming = answer[len(seq.tokens) - seq.prompt_len :][: min(most, self.most)]
        return [(t + 1) % VOCAB if self.wrong() else t for t in coming]


def driven(requests: list[Request], drafter: Answers | None, ahead: bool = False, **runner) -> Drive:
    fake = FakeRunner(**runner)
    drive = Drive(Scheduler(fake.capacity, drafter=drafter), fake, ahead)
    for r in requests:
        drive.scheduler.add(r)
    while drive.scheduler.has_work() or drive.pending:
        drive.step()
        drive.scheduler.check()
    return drive


def decodes(drive: Drive) -> int:
    return sum(any(w.sample for w in plan.works) for plan in drive.plans)


@pytest.mark.parametrize("ahead", [False, True])
def test_right_drafts_save_steps(ahead):
    asked = [request("a", [1, 2, 3], max_tokens=33)]
    drive = driven(asked, Answers(7), ahead)
    assert drive.tokens["a", 0] == by_hand(asked[0], VOCAB, LENGTH)[0]
    assert decodes(drive) == 1 + 32 // 8
    assert drive.scheduler.accepted_tokens == drive.scheduler.drafted_tokens == 28


def test_wrong_drafts_cost_no_token():
    asked = [request("a", [1, 2, 3], max_tokens=33)]
    drive = driven(asked, Answers(7, lambda: True))
    assert drive.tokens["a", 0] == by_hand(asked[0], VOCAB, LENGTH)[0]
    assert decodes(drive) == 33
    assert drive.scheduler.accepted_tokens == 0 < drive.scheduler.drafted_tokens


@pytest.mark.parametrize("more", [[VOCAB], [-1], [7] * 9])
def test_ids_outside_the_vocabulary_and_beyond_the_end_are_not_computed(more):
    class Careless(Answers):
        def guess(self, seq: Sequence, most: int) -> list[int]:
            return [*super().guess(seq, most), *more]

    asked = [request("a", [1, 2, 3], max_tokens=33)]
    drive = driven(asked, Careless(3))
    assert drive.tokens["a", 0] == by_hand(asked[0], VOCAB, LENGTH)[0] and drive.scheduler.accepted_tokens
    assert max(w.start + w.count for plan in drive.plans for w in plan.works) == 3 + 33 - 1


def test_a_draft_takes_no_tokens_of_a_step_from_others():
    asked = [request(f"r{i}", [i], max_tokens=20) for i in range(6)]
    drive = driven(asked, Answers(), max_tokens_per_step=8, max_rows=6)
    full = [plan for plan in drive.plans if len(plan.works) == 6 and not plan.joined]
    assert full and all(plan.num_tokens <= 8 for plan in full)
    assert any(w.drafted for plan in full for w in plan.works)


def test_a_draft_takes_no_blocks_from_others():
    """Two would draft into their third blocks at once, and one is free until the first has ended."""
    asked = [request(f"r{i}", [i] * 30, max_tokens=18 if i else 2) for i in range(3)]
    plain = driven(asked, None, num_blocks=8, max_rows=3, max_tokens_per_step=128)
    drafted = driven(asked, Answers(), num_blocks=8, max_rows=3, max_tokens_per_step=128)
    assert plain.scheduler.preemptions == drafted.scheduler.preemptions == 0
    assert drafted.scheduler.accepted_tokens and drafted.tokens == plain.tokens


def test_a_runner_that_takes_no_drafts_is_refused_a_drafter():
    with pytest.raises(ConfigError, match="draft"):
        Scheduler(FakeRunner(max_drafted=0).capacity, drafter=Answers())


def test_the_end_of_a_prompt_and_a_draft_may_be_in_flight_together():
    asked = [request("a", list(range(9)), max_tokens=20)]
    drive = driven(asked, Answers(7, waits=False), ahead=True, max_tokens_per_step=8)
    assert drive.tokens["a", 0] == by_hand(asked[0], VOCAB, LENGTH)[0]


@examples(20)
@given(st.integers(0, 2**32), st.booleans())
def test_any_draft_gives_the_same_answers(seed, ahead):
    rng = random.Random(seed)
    asked = [
        request(f"r{i}", [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))], max_tokens=rng.randrange(1, 40),
                n=rng.choice([1, 2]), temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(99))
        for i in range(4)
    ]  # fmt: skip
    drafter = Answers(rng.randrange(1, 9), lambda: rng.random() < 0.3)
    drive = driven(asked, drafter, ahead, window=rng.choice([0, 20, (0, 12)]), block_size=4, num_blocks=120)
    for r in asked:
        for i, answer in enumerate(by_hand(r, VOCAB, LENGTH)):
            assert drive.tokens[r.id, i] == answer


class Eager(Speculator):
    """Asks the runner for guesses whatever they cost, and drafts all of them."""

    def __init__(self, most: int = 8):
        super().__init__(("draft",), most=most)
        self.most_of_all = most
        self.taken: list[tuple[Sequence, tuple[int, ...], int]] = []

    def pays(self, rows: int, predicted: bool) -> bool:
        return True

    def asks(self, seq: Sequence, most: int) -> int:
        self._state(seq).waiting = True
        return min(most, self.most_of_all)

    def proposed(self, seq: Sequence, ids: Seq[int], after: int) -> None:
        super().proposed(seq, ids, after)
        self.taken.append((seq, tuple(ids), after))

    def propose(self, asked: Seq[Asked], budget: int) -> list[array[int]]:
        return [self._guess(seq, min(most, budget)).ids for seq, most in asked]


def guided_requests(rng: random.Random, guided: float) -> list[Request]:
    return [
        replace(
            request(f"r{i}", [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))],
                    max_tokens=rng.randrange(1, 40), n=rng.choice([1, 2]), temperature=rng.choice([0.0, 1.0]),
                    seed=rng.randrange(99)),
            grammar=f"{rng.randrange(1000)} {rng.randrange(1, 40)}" if rng.random() < guided else None,
        )
        for i in range(4)
    ]  # fmt: skip


def guessing(
    asked: list[Request], drafter: Speculator, right: float, ahead: bool, jump: bool = True, **runner
) -> Drive:
    fake = FakeRunner(guesses=right, **runner)
    drive = Drive(Scheduler(fake.capacity, drafter=drafter, guides=HandGuides(), jump_ahead=jump), fake, ahead)
    for r in asked:
        drive.scheduler.add(r)
    while drive.scheduler.has_work() or drive.pending:
        drive.step()
        drive.scheduler.check()
    for r in asked:
        for i, answer in enumerate(by_hand(r, VOCAB, LENGTH)):
            assert drive.tokens[r.id, i] == answer
    return drive


@examples(20)
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([0.0, 0.5, 1.0]))
def test_any_guesses_of_the_runner_give_the_same_answers(seed, ahead, right):
    """With few blocks, too, and beside sequences that follow grammars."""
    rng = random.Random(seed)
    runner = {"window": rng.choice([0, 20, (0, 12)]), "block_size": 4, "num_blocks": rng.choice([30, 120])}
    drafter = Eager(rng.randrange(1, 9)) if rng.random() < 0.7 else Speculator(("ngram", "draft"))
    guessing(guided_requests(rng, 0.4), drafter, right, ahead, rng.random() < 0.7, **runner)


@examples(20)
@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_guesses_that_know_the_grammar_are_right(seed, ahead, jump):
    """Each is drawn under the mask after the guesses before it, and follows the ids that its step has sampled."""
    rng, drafter = random.Random(seed), Eager()
    drive = guessing(guided_requests(rng, 1.0), drafter, 1.0, ahead, jump)
    for seq, ids, after in drafter.taken:
        assert ids[: len(seq.tokens) - after] == tuple(seq.tokens[after : after + len(ids)])
    wrong = drive.scheduler.drafted_tokens - drive.scheduler.accepted_tokens
    assert wrong <= len(drive.tokens), "one that ends its sequence is not counted"


def test_right_guesses_save_steps():
    asked = [request("a", [1, 2, 3], max_tokens=33)]
    drive = guessing(asked, Eager(7), 1.0, ahead=False)
    assert drive.scheduler.accepted_tokens == drive.scheduler.drafted_tokens == 28
    assert decodes(drive) == 1 + 32 // 8


def test_drafts_follow_forced_ids():
    """Guesses go on after the ids that the grammar forces, and are checked by the step that computes these."""
    drive = guessing([replace(request("a", [1, 2, 3], max_tokens=60), grammar="2 60")], Eager(7), 1.0, ahead=False)
    after = [work for plan in drive.plans for work in plan.works if work.drafted and work.count - work.drafted > 1]
    assert drive.scheduler.forced_tokens == 8 and len(after) == 5
    assert drive.scheduler.accepted_tokens == drive.scheduler.drafted_tokens == 43
    assert decodes(drive) == 9, "16 if a step had either forced ids or a draft"


@pytest.mark.parametrize("broken", ["copy", "advance", "allowed"])
def test_a_grammar_that_cannot_be_followed_ahead_costs_guesses_only(broken, monkeypatch):
    """The guide itself stays sound, and other sequences keep their guesses."""

    def fail(self, *_):
        raise KvasirError("broken")

    class Broken(HandGuide):
        copied = False

        def copy(self):
            if broken == "copy" and self.grammar.startswith("7 "):
                raise KvasirError("broken")
            other = Broken(self.grammar)
            other.place = self.place
            if self.grammar.startswith("7 "):
                setattr(other, broken, fail.__get__(other))
            return other

    monkeypatch.setattr("tests.sched.guides.HandGuide", Broken)
    asked = [replace(request(f"r{seed}", [1, 2], max_tokens=30), grammar=f"{seed} 30") for seed in (7, 8)]
    drafter = Eager()
    drive = guessing(asked, drafter, 1.0, ahead=False, jump=False)
    assert {seq.request.id for seq, _, _ in drafter.taken} == {"r8"} and not set(drive.reasons.values()) & {"error"}
