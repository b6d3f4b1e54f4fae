"""What is sent again after a death, and what is not."""

from kvasir.engine.journal import Journal
from kvasir.types import Delta, FinishReason, Request, SamplingParams


def req(id: str, n: int = 1) -> Request:
    return Request(id, (1, 2), SamplingParams(n=n, seed=0))


def test_a_running_stream_goes_on_where_it_stopped():
    j = Journal()
    j.add(req("a", n=2))
    (sent,) = j.to_send()
    assert sent.resume_ids == ()
    j.joining(["a"])
    j.take(Delta("a", 0, (7,)))
    j.take(Delta("a", 1, (8,), finish_reason=FinishReason.STOP))
    assert j.death() == []
    (again,) = j.to_send()
    assert again.resume_ids == ((7,), (8,)) and again.done == (1,)


def test_a_poison_request_dies_alone():
    j = Journal()
    for name in "apb":
        j.add(req(name))
    assert len(j.to_send()) == 3
    j.joining(["a", "p", "b"])
    assert j.death() == []
    assert [r.id for r in j.to_send()] == ["a"] and j.to_send() == []
    j.joining(["a"])
    j.take(Delta("a", 0, (1,)))
    assert [r.id for r in j.to_send()] == ["p"]
    j.joining(["p"])
    assert [r.id for r in j.death()] == ["p"]
    assert [r.id for r in j.to_send()] == ["a"]
    j.take(Delta("a", 0, (2,)))
    assert [r.id for r in j.to_send()] == ["b"]
    j.take(Delta("b", 0, (3,)))
    assert set(j.entries) == {"a", "b"} and j.entries["a"].deaths == 1


def test_those_that_only_waited_are_kept_for_ever():
    j = Journal()
    j.add(req("runs"))
    j.add(req("waits"))
    j.to_send()
    j.joining(["runs"])
    j.death()
    assert [r.id for r in j.to_send()] == ["runs"]
    assert [r.id for r in j.death()] == ["runs"]
    assert [r.id for r in j.to_send()] == ["waits"]
    assert j.entries["waits"].deaths == 0


def test_a_new_request_waits_behind_the_quarantine():
    j = Journal()
    j.add(req("a"))
    j.to_send()
    j.joining(["a"])
    j.death()
    j.add(req("new"))
    assert [r.id for r in j.to_send()] == ["a"]
    assert j.to_send() == []
    j.forget("a")
    assert [r.id for r in j.to_send()] == ["new"]
