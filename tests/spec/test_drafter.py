"""The drafter of an engine."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvasir.errors import KvasirError
from kvasir.runner.fake import FakeRunner
from kvasir.sched.drafts import Asked, StepTime
from kvasir.sched.scheduler import Scheduler
from kvasir.spec.drafter import FAR, Speculator
from kvasir.speculation import Speculation
from kvasir.types import Request, ServiceClass, Target
from tests.sched.drive import Drive, by_hand, request

VOCAB, LENGTH = 251, 512


class Timed(Speculator):
    """Measures nothing: steps take as long as the model of time says."""

    def __init__(self, *args, seconds=lambda rows: 1 + 0.02 * rows, **more):
        super().__init__(*args, **more)
        for rows in range(1, 40):
            self.times.note(rows, seconds(rows))

    def measured(self, rows: int, drafted: int, time: StepTime) -> None:
        pass


def driven(requests: list[Request], drafter, ahead: bool = False, observed: bool = False, **runner) -> Drive:
    """observed: whether the drafter hears of each step."""
    fake = FakeRunner(vocab_size=VOCAB, **runner)
    drive = Drive(Scheduler(fake.capacity, drafter=drafter), fake, ahead)
    commit = drive.scheduler.commit

    def observing(plan, result):
        drive.scheduler.observe(plan, StepTime(1.0, 1.0))
        return commit(plan, result)

    if observed:
        drive.scheduler.commit = observing  # type: ignore[method-assign]
    for r in requests:
        drive.scheduler.add(r)
    while drive.scheduler.has_work() or drive.pending:
        drive.step()
        drive.scheduler.check()
    return drive


def answer(asked: Request, index: int = 0) -> list[int]:
    [found] = by_hand(asked, VOCAB, LENGTH, which=(index,))
    return list(found)


def predicted(prediction: list[int], **more) -> Request:
    return replace(request("a", [1, 2, 3], max_tokens=64), prediction=tuple(prediction), **more)


def decodes(drive: Drive) -> int:
    return sum(any(w.sample for w in plan.works) for plan in drive.plans)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_prediction_is_followed(ahead):
    asked = predicted([])
    right = answer(asked)
    drive = driven([predicted(right)], Timed(("ngram",)), ahead)
    assert drive.tokens["a", 0] == right
    assert decodes(drive) < 64 / 4


def test_a_prediction_is_followed_again_after_an_edit():
    right = answer(predicted([]))
    edited = [*right[:20], 5, 6, 7, *right[24:40], *right[44:]]
    guesses = Timed(())
    drive = driven([predicted(edited)], guesses)
    assert drive.tokens["a", 0] == right
    assert decodes(drive) < 40 and 2 <= guesses.lookups <= 16


def test_a_wrong_prediction_costs_little():
    shuffled = answer(predicted([]))[::-1]
    drive = driven([predicted(shuffled)], Timed(()))
    assert drive.tokens["a", 0] == answer(predicted([]))
    assert decodes(drive) == 64 and drive.scheduler.drafted_tokens < 40


def test_copies_are_drafted():
    """The answer of one request is the prompt of the next, which answers the same."""
    right = answer(predicted([]))
    asked = request("b", [*[1, 2, 3], *right, *[1, 2, 3], *right[:4]], max_tokens=40)
    guesses = Timed(("ngram",))
    drive = driven([asked], guesses)
    assert drive.tokens["b", 0] == answer(asked)
    assert drive.scheduler.drafted_tokens > 0


def test_answers_to_a_key_are_drafted_for_it_alone():
    def ask(name: str, tenant: str, **more) -> Request:
        return replace(request(name, [1, 2, 3, 4], max_tokens=64), tenant=tenant, **more)

    guesses = Timed(("suffix",))
    fake = FakeRunner(vocab_size=VOCAB)
    drive, used = Drive(Scheduler(fake.capacity, drafter=guesses), fake), {}
    requests = [
        ask("a", "k"),
        ask("b", "other"),
        ask("c", "k", cache_salt="s"),
        ask("d", "k"),
        ask("e", "none", no_cache=True),
        ask("f", "none"),
    ]
    for asked in requests:
        before = drive.scheduler.accepted_tokens
        drive.scheduler.add(asked)
        while drive.scheduler.has_work() or drive.pending:
            drive.step()
        assert drive.tokens[asked.id, 0] == answer(asked)
        used[asked.id] = drive.scheduler.accepted_tokens - before
    assert used["d"] > 30 and not any(used[name] for name in "abcef")


@pytest.mark.parametrize("ahead", [False, True])
def test_what_goes_on_as_found_is_not_looked_for_again(ahead):
    """The answer repeats itself every 10 ids. FAR ids from a lookup last for as many tokens, less those of one step."""
    asked, guesses = request("a", [1, 2, 3, 4], max_tokens=300), Timed(("ngram",), most=4)
    drive = driven([asked], guesses, ahead)
    assert drive.tokens["a", 0] == answer(asked)
    assert 60 <= decodes(drive) < 90
    assert guesses.lookups <= 2 * 12 + 300 // (FAR - 5) + 1


def test_answers_are_learnt_from_when_there_is_time():
    guesses = Timed(("suffix",))
    drive = Drive(Scheduler((fake := FakeRunner(vocab_size=VOCAB)).capacity, drafter=guesses), fake)
    drive.scheduler.add(request("a", [1, 2, 3, 4], max_tokens=50))
    while drive.scheduler.running or drive.scheduler.waiting:
        drive.step()
    assert guesses.learns and not guesses._pools._pools
    taken = [guesses.learn(20) for _ in range(4)]
    assert taken == [20, 20, 10, 0] and not guesses.learns
    pool = guesses._pools.of(("", ""))
    found = drive.tokens["a", 0]
    assert pool and list(pool._ids[:50]) == found


def test_a_request_may_refuse_drafts_and_bound_them():
    right = answer(predicted([]))
    off = driven([predicted(right, speculation=Speculation(()))], Timed(("ngram",)))
    assert off.scheduler.drafted_tokens == 0
    few = driven([predicted(right, speculation=Speculation(None, 2))], Timed(("ngram",)))
    assert max(w.drafted for plan in few.plans for w in plan.works) == 2
    assert off.tokens == few.tokens == {("a", 0): right}


def test_no_draft_where_rows_are_dear():
    right = answer(predicted([]))
    dear = Timed(("ngram",), seconds=lambda rows: rows)
    drive = driven([predicted(right)], dear)
    assert drive.scheduler.drafted_tokens == 0 and not dear.pays(1, False) and not dear.pays(8, False)


def test_no_draft_makes_a_step_miss_its_target():
    right = answer(predicted([]))
    slow = Timed(("ngram",), {ServiceClass.INTERACTIVE: Target(1, 1.1)})
    drive = driven([predicted(right)], slow)
    assert {w.drafted for plan in drive.plans for w in plan.works if w.sample} <= {0, 1, 2, 3, 4}
    assert drive.scheduler.accepted_tokens and drive.tokens["a", 0] == right


def test_columns_are_used_while_drafts_do_not_pay():
    asked = [request(f"r{i}", [i, i + 1], max_tokens=30, temperature=0.0) for i in range(40)]
    dear = driven(asked, Timed(("ngram",), seconds=lambda rows: rows), max_rows=64, max_tokens_per_step=512)
    assert any(plan.decodes for plan in dear.plans)
    cheap = driven(asked, Timed(("ngram",)), max_rows=64, max_tokens_per_step=512)
    assert not any(plan.decodes for plan in cheap.plans)
    assert dear.tokens == cheap.tokens


class Clocked(Timed):
    """Steps take `base`, and drafters as long as `host` for each sequence in addition."""

    def __init__(self, *args, host: float, **more):
        super().__init__(*args, **more)
        self.host, self.worked = host, True

    def pays(self, rows: int, predicted: bool) -> bool:
        self.worked = super().pays(rows, predicted)
        return self.worked

    def measured(self, rows: int, drafted: int, time: StepTime) -> None:
        sequences = rows - drafted
        period = 1 + 0.02 * rows + self.host * sequences * self.worked
        Speculator.measured(self, rows, drafted, StepTime(period, period))


@pytest.mark.parametrize(("right", "host"), [(False, 0.0), (False, 0.05), (True, 0.05)])
def test_many_sequences_pause_drafters_that_cost_more_than_they_win(right, host):
    """Then they are planned in columns."""
    plain = [request(f"r{i}", [i, i + 1], max_tokens=400, temperature=0.0) for i in range(16)]
    asked = [replace(r, prediction=tuple(answer(r) if right else [9] * 400)) for r in plain]
    guesses = Clocked((), host=host)
    drive = driven(asked, guesses, observed=True, max_rows=16, max_tokens_per_step=512, num_blocks=512)
    assert drive.tokens == {(r.id, 0): answer(r) for r in plain}
    columns = sum(bool(plan.decodes) for plan in drive.plans) / len(drive.plans)
    assert columns > 0.5 if host and not right else columns < 0.3


def test_answers_that_are_predicted_are_tried_apart():
    guesses = Speculator(("ngram",))
    for _ in range(200):
        slow = StepTime(1.0 + guesses.pays(1, False), 1.0 + guesses.pays(1, False))
        guesses.measured(1, 0, slow)
    assert not guesses.pays(1, False) and guesses.pays(1, True)


def test_steps_that_compute_prompts_are_not_measured():
    guesses = Speculator(("ngram",))
    driven([request("a", [5, 6, 7] * 90, max_tokens=1)], guesses, observed=True, max_tokens_per_step=16)
    assert not guesses.times.rows
    driven([request("b", [5, 6, 7] * 90, max_tokens=9)], guesses, observed=True, max_tokens_per_step=16)
    assert guesses.times.rows


def test_what_is_not_found_is_looked_for_once_at_a_place():
    seq: Any = SimpleNamespace(tokens=array("i"))
    guesses = Speculator(("ngram",))
    for tokens, lookups in [([1, 2, 3, 4], 1), ([1, 2, 3, 4], 1), ([1, 2, 3, 4, 1], 2), ([1, 2, 3, 4, 1, 2], 3)]:
        seq.tokens = array("i", tokens)
        found, _ = guesses._ngram(seq, seq.tokens, 4)
        assert guesses.lookups == lookups
    assert list(found) == [3, 4, 1, 2]


def test_nothing_is_kept_of_sequences_that_ended():
    guesses = Timed(("ngram", "suffix"))
    asked = [request(f"r{i}", [random.Random(i).randrange(5) for _ in range(20)], max_tokens=9) for i in range(9)]
    driven(asked, guesses)
    assert not guesses._of


def test_a_guide_that_fails_gives_no_guess():
    """Planning must not fail: the step meets the error again, and it ends this sequence alone."""

    class Failing:
        done = False

        def forced(self) -> list[int]:
            raise KvasirError("the grammar cannot be followed")

        def copy(self) -> Failing:
            raise KvasirError("the grammar cannot be followed")

    guidance = SimpleNamespace(guide=Failing(), jumps=False)
    asked = predicted([1, 2, 3])
    seq = SimpleNamespace(
        request=asked, guidance=guidance, counts=SimpleNamespace(in_flight=0), tokens=array("i", asked.prompt_ids),
        prompt_len=3, emission=SimpleNamespace(holds_back=False),
    )  # fmt: skip
    assert [*Timed(("ngram",)).propose([Asked(seq, 4)], 4)] == [array("i")]  # type: ignore[arg-type]
