"""What is sent again after a death, and what is not."""

from dataclasses import replace

import pytest

from kvasir.engine.journal import SUSPECT_LIVES, Journal, RequestStage
from kvasir.types import Delta, FinishReason, Request, SamplingParams, Transfer


def req(id: str, n: int = 1, deadline: float | None = None) -> Request:
    return Request(id, (1, 2), SamplingParams(n=n, seed=0), deadline=deadline)


def test_a_running_stream_resumes_where_it_stopped():
    j = Journal()
    j.add(req("a", n=2))
    (sent,) = j.to_send()
    assert sent.resume_ids == ()
    j.reached(["a"], RequestStage.JOINED)
    j.take(Delta("a", 0, (7,), carry=b"x"))
    j.take(Delta("a", 1, (8,), finish_reason=FinishReason.STOP))
    assert j.death() == []
    (again,) = j.to_send()
    assert again.resume_ids == ((7,), (8,)) and again.done == (1,)
    assert again.resume_carries == (b"x", b"")


def test_blocks_that_came_for_a_request_are_lost_with_the_engine():
    """A request whose blocks come from another engine waits for them once; one that sends its own sends them again."""
    j = Journal()
    j.add(replace(req("a"), takes=Transfer("t"), sends=Transfer("u")))
    j.add(replace(req("b"), takes=Transfer("v"), resume_ids=((7,),), resume_carries=(b"",)))
    sent = j.to_send()
    assert [r.takes and r.takes.id for r in sent] == ["t", "v"] and sent[1].resume_ids == ((7,),)
    j.reached("ab", RequestStage.TAKEN)
    assert j.death() == []
    assert [(r.takes, r.sends and r.sends.id) for r in j.to_send()] == [(None, "u"), (None, None)]


def names(requests) -> list[str]:
    return [r.id for r in requests]


def test_all_requests_resume_together_with_new_ones_after_a_death():
    j = Journal()
    for i in range(24):
        j.add(req(f"r{i}"))
    j.to_send()
    j.reached([f"r{i}" for i in range(24)], RequestStage.JOINED)
    assert j.death() == []
    j.add(req("new"))
    assert names(j.to_send()) == [*(f"r{i}" for i in range(24)), "new"]


def test_a_poison_request_is_found_by_halves_and_dies_alone():
    j = Journal()
    for name in "apbc":
        j.add(req(name))
    for _ in range(2):
        assert names(j.to_send()) == ["a", "p", "b", "c"]
        j.reached("apbc", RequestStage.JOINED)
        assert j.death() == []
    j.add(req("new"))
    assert names(j.to_send()) == ["a", "p"] and j.to_send() == []
    j.reached("ap", RequestStage.JOINED)
    assert j.death() == []
    assert names(j.to_send()) == ["a"]
    j.reached("a", RequestStage.JOINED)
    assert j.take(Delta("a", 0, (1,)))
    assert names(j.to_send()) == ["p"]
    j.reached("p", RequestStage.JOINED)
    assert j.death() == [], "it was not alone"
    assert names(j.to_send()) == ["p"] and j.on_trial
    j.reached("p", RequestStage.JOINED)
    assert names(j.death()) == ["p"]
    assert names(j.to_send()) == ["b", "c"], "the other half is still to be tried"
    j.take(Delta("b", 0, (1,)))
    assert j.to_send() == []
    j.take(Delta("c", 0, (1,)))
    assert names(j.to_send()) == ["a", "new"]
    assert set(j.entries) == {"a", "b", "c", "new"} and not j.on_trial


def test_a_token_makes_a_suspect_innocent_again():
    j = Journal()
    j.add(req("a"))
    for token in range(9):
        assert names(j.to_send()) == ["a"]
        j.reached("a", RequestStage.JOINED)
        j.take(Delta("a", 0, (token,)))
        assert j.death() == []
    j.to_send()
    j.reached("a", RequestStage.JOINED)
    assert names(j.death()) == ["a"], "the second without a token"


def test_requests_that_only_waited_are_kept_after_a_death():
    j = Journal()
    j.add(req("runs"))
    j.add(req("waits"))
    for _ in range(2):
        j.to_send()
        j.reached(["runs", "waits"], RequestStage.TAKEN)
        j.reached(["runs"], RequestStage.JOINED)
        assert j.death() == [], "it was not alone in the engine"
    assert names(j.to_send()) == ["runs"]
    j.reached(["runs"], RequestStage.JOINED)
    assert names(j.death()) == ["runs"]
    assert names(j.to_send()) == ["waits"]
    assert j.entries["waits"].deaths == 0


def test_a_request_that_the_engine_never_took_loses_no_attempt():
    j = Journal()
    j.add(req("a"))
    for _ in range(9):
        assert names(j.to_send()) == ["a"]
        assert j.death() == []
    assert j.entries["a"].deaths == j.entries["a"].lives == 0


def test_a_request_that_waits_in_one_dying_engine_after_another_is_suspected():
    j = Journal()
    j.add(req("runs"))
    j.add(req("waits"))
    for token in range(SUSPECT_LIVES):
        assert names(j.to_send()) == ["runs", "waits"]
        j.reached(["runs", "waits"], RequestStage.TAKEN)
        j.reached(["runs"], RequestStage.JOINED)
        j.take(Delta("runs", 0, (token,)))
        assert j.death() == []
    assert names(j.to_send()) == ["waits"], "it is tried alone"


def test_a_suspect_that_the_engine_did_not_accept_is_retried():
    j = Journal()
    j.add(req("a"))
    j.add(req("b"))
    for _ in range(2):
        j.to_send()
        j.reached("ab", RequestStage.JOINED)
        j.death()
    for _ in range(3):
        assert names(j.to_send()) == ["a"]
        assert j.death() == []
    assert names(j.to_send()) == ["a"]
    j.reached("a", RequestStage.JOINED)
    assert names(j.death()) == ["a"]


@pytest.mark.parametrize("message", [["poison"], ["poison", None]])
def test_a_request_that_kills_before_its_first_step_does_not_loop(message):
    j = Journal()
    j.add(req("poison"))
    for last in (False, True):
        j.to_send()
        for line in message:
            j.take_report(line)
        assert names(j.death()) == ["poison"] * last
    assert not j.entries


def test_a_request_that_kills_while_being_queued_is_suspected_with_the_running_ones():
    j = Journal()
    j.add(req("runs"))
    j.add(req("poison"))
    j.to_send()
    for line in ("runs", None, ["runs"], "poison"):
        j.take_report(line)
    j.death()
    assert [e.deaths for e in j.entries.values()] == [1, 1]


def test_a_suspect_that_leaves_ends_its_trial():
    j = Journal()
    for name in "abc":
        j.add(req(name))
    for _ in range(2):
        j.to_send()
        j.reached("abc", RequestStage.JOINED)
        j.death()
    assert names(j.to_send()) == ["a", "b"]
    j.forget("a")
    j.forget("b")
    j.forget("c")
    j.add(req("new"))
    assert names(j.to_send()) == ["new"]


def test_a_deadline_keeps_counting_while_the_engine_restarts():
    now = 100.0
    j = Journal(lambda: now)
    j.add(req("a", n=2, deadline=10.0))
    assert [r.waited for r in j.to_send()] == [0.0]
    j.reached(["a"], RequestStage.JOINED)
    j.take(Delta("a", 0, (7,)))
    now = 104.0
    j.death()
    assert j.overdue() == []
    assert [(r.waited, r.deadline) for r in j.to_send()] == [(4.0, 10.0)]
    j.take(Delta("a", 1, (8,), finish_reason=FinishReason.STOP))
    now = 111.0
    assert j.overdue() == [], "the engine has it and ends it"
    j.death()
    assert j.overdue() == [Delta("a", 0, finish_reason=FinishReason.TIMEOUT)]
    assert not j.entries and j.to_send() == []


def test_a_resent_request_was_accepted_before():
    j = Journal()
    j.add(req("a", n=2))
    assert j.num_held == 2
    assert [r.resume_ids for r in j.to_send()] == [()]
    assert j.num_held == 0
    j.death()
    assert [r.resume_ids for r in j.to_send()] == [((), ())]
