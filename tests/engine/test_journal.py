"""What is sent again after a death, and what is not."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.engine.journal import Journal, Stage
from kvasir.types import Delta, FinishReason, Request, SamplingParams


def req(id: str, n: int = 1, deadline: float | None = None) -> Request:
    return Request(id, (1, 2), SamplingParams(n=n, seed=0), deadline=deadline)


def test_a_running_stream_goes_on_where_it_stopped():
    j = Journal()
    j.add(req("a", n=2))
    (sent,) = j.to_send()
    assert sent.resume_ids == ()
    j.reached(["a"], Stage.JOINED)
    j.take(Delta("a", 0, (7,), carry=b"x"))
    j.take(Delta("a", 1, (8,), finish_reason=FinishReason.STOP))
    assert j.death() == []
    (again,) = j.to_send()
    assert again.resume_ids == ((7,), (8,)) and again.done == (1,)
    assert again.resume_carries == (b"x", b"")


def test_a_poison_request_dies_alone():
    j = Journal()
    for name in "apb":
        j.add(req(name))
    assert len(j.to_send()) == 3
    j.reached(["a", "p", "b"], Stage.JOINED)
    assert j.death() == []
    assert [r.id for r in j.to_send()] == ["a"] and j.to_send() == []
    j.reached(["a"], Stage.JOINED)
    j.take(Delta("a", 0, (1,)))
    assert [r.id for r in j.to_send()] == ["p"]
    j.reached(["p"], Stage.JOINED)
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
    j.reached(["runs"], Stage.JOINED)
    j.death()
    assert [r.id for r in j.to_send()] == ["runs"]
    j.reached(["runs"], Stage.JOINED)
    assert [r.id for r in j.death()] == ["runs"]
    assert [r.id for r in j.to_send()] == ["waits"]
    assert j.entries["waits"].deaths == 0


def test_a_new_request_waits_behind_the_quarantine():
    j = Journal()
    j.add(req("a"))
    j.to_send()
    j.reached(["a"], Stage.JOINED)
    j.death()
    j.add(req("new"))
    assert [r.id for r in j.to_send()] == ["a"]
    assert j.to_send() == []
    j.forget("a")
    assert [r.id for r in j.to_send()] == ["new"]


def test_what_the_engine_never_took_loses_no_life():
    j = Journal()
    j.add(req("a"))
    for _ in range(5):
        assert [r.id for r in j.to_send()] == ["a"]
        assert j.death() == []
    assert j.entries["a"].deaths == 0


def test_a_suspect_that_was_not_taken_is_innocent_and_goes_first_again():
    j = Journal()
    for name in "ab":
        j.add(req(name))
    j.to_send()
    j.reached(["a", "b"], Stage.JOINED)
    j.death()
    assert [r.id for r in j.to_send()] == ["a"]
    assert j.death() == []
    assert [r.id for r in j.to_send()] == ["a"] and j.entries["a"].deaths == 1


def test_a_request_that_kills_before_its_first_step_does_not_loop():
    j = Journal()
    j.add(req("poison"))
    j.to_send()
    j.reached(["poison"], Stage.TAKEN)
    assert j.death() == []
    j.to_send()
    j.reached(["poison"], Stage.TAKEN)
    assert [r.id for r in j.death()] == ["poison"] and not j.entries


def test_a_deadline_goes_on_counting_over_a_death():
    now = 100.0
    j = Journal(lambda: now)
    j.add(req("a", n=2, deadline=10.0))
    assert [r.waited for r in j.to_send()] == [0.0]
    j.reached(["a"], Stage.JOINED)
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


def test_what_is_sent_again_was_accepted_before():
    j = Journal()
    j.add(req("a", n=2))
    assert j.num_held == 2
    assert [r.resume_ids for r in j.to_send()] == [()]
    assert j.num_held == 0
    j.death()
    assert [r.resume_ids for r in j.to_send()] == [((), ())]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_only_deaths_with_a_request_in_hand_are_counted_and_nothing_is_forgotten(data):
    """Random lives of random engines: who fails was in hand at two deaths, and all others come to their end."""
    j, in_hand = Journal(), {}
    sent: list[str] = []
    for step in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(("add", "take", "join", "token", "leave", "die", "flush"))):
            case "add":
                j.add(req(f"r{step}"))
                in_hand[f"r{step}"] = 0
            case "take" if sent:
                name = data.draw(st.sampled_from(sent))
                j.reached([name], max(j.entries[name].stage, Stage.TAKEN))
            case "join" if sent:
                j.reached([data.draw(st.sampled_from(sent))], Stage.JOINED)
            case "token" if joined := [n for n in sent if j.entries[n].stage is Stage.JOINED]:
                assert j.take(Delta(data.draw(st.sampled_from(joined)), 0, (step,)))
            case "leave" if j.entries:
                j.forget(data.draw(st.sampled_from(sorted(j.entries))))
            case "die":
                for name in sent:
                    in_hand[name] += j.entries[name].stage > Stage.SENT
                failed = [r.id for r in j.death()]
                assert all(in_hand[name] >= 2 for name in failed) and not set(failed) & set(j.entries)
                assert all(e.deaths <= in_hand[name] and e.deaths < 2 for name, e in j.entries.items())
                sent = []
            case "flush":
                sent += [r.id for r in j.to_send()]
        sent = [name for name in sent if name in j.entries]
    while j.entries:
        sent += [r.id for r in j.to_send()]
        assert sent, "nothing goes on"
        j.reached(sent[:1], Stage.JOINED)
        assert j.take(Delta(sent.pop(0), 0, (1,), finish_reason=FinishReason.LENGTH))
