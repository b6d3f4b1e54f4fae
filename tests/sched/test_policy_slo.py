"""The order of service: classes, slack, turns, and the guarantee that no request starves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.config import EngineOptions, slo_targets
from kvasir.errors import ConfigError
from kvasir.sched import slo
from kvasir.sched.fairness import Fairness, charge, present
from kvasir.sched.slo import PROMOTE_AFTER, ServiceFacts, expired, promote, service_order, victim_key
from kvasir.types import ServiceClass, Target
from tests.examples import examples

INTERACTIVE, BATCH, BACKGROUND = ServiceClass
TARGETS = {INTERACTIVE: Target(2.0, 0.1), BATCH: Target(30.0, 0.5), BACKGROUND: Target(600.0, 5.0)}
RATE = 1000  # prompt tokens a second
EVERYBODY = {"": 1.0, "a": 1.0, "b": 1.0}


def shares(**counters: int) -> dict[ServiceClass, Fairness]:
    state = present(Fairness(), EVERYBODY)
    for tenant, tokens in counters.items():
        state = charge(state, {tenant: (tokens, 0)})
    return dict.fromkeys(ServiceClass, state)


def facts(order: int, prefill: int = 100, waited: float = 0.0, slo: ServiceClass = INTERACTIVE, **more) -> ServiceFacts:
    return ServiceFacts(order, slo, TARGETS[slo], waited, prefill, prefill / RATE, **more)


def served(*candidates: ServiceFacts, **counters: int) -> list[int]:
    """Orders of arrival in the order of service."""
    return [candidates[i].order for i in service_order(candidates, shares(**counters))]


def test_class_goes_before_all_else():
    late = facts(1, 50, waited=9.0, priority=5, tenant="a")
    assert served(facts(0, 1, slo=BACKGROUND, running=True), facts(2, 9, slo=BATCH, priority=-9), late) == [1, 2, 0]


def test_requests_with_a_started_answer_go_first():
    assert served(facts(0, 10), facts(1, 900, started=True)) == [1, 0]


def test_within_the_slack_the_shortest_goes_first():
    assert served(facts(0, 800), facts(1, 100), facts(2, 20)) == [2, 1, 0]


def test_requests_of_similar_length_keep_their_order():
    assert served(facts(0, 127), facts(1, 65), facts(2, 100)) == [0, 1, 2]


def test_requests_that_end_with_their_prefill_go_by_their_exact_length_and_before_others_of_similar_length():
    ends = {"prefill_only": True}
    assert served(facts(0, 127, **ends), facts(1, 65, **ends), facts(2, 70), facts(3, 100, **ends), facts(4, 20)) == [
        4, 1, 3, 0, 2,
    ]  # fmt: skip
    assert served(facts(0, 127, waited=9.0, **ends), facts(1, 65, waited=9.0, **ends)) == [0, 1], "late"


def test_late_requests_go_last_and_early_ones_are_not_hurried():
    hurried, late, too_long = facts(0, 300, waited=1.6), facts(1, 10, waited=2.5), facts(4, 500, waited=1.6)
    assert served(too_long, late, hurried, facts(2, 10), facts(3, 900)) == [2, 0, 3, 1, 4]


def test_late_requests_are_served_in_order_of_arrival():
    assert served(facts(1, 10, waited=5), facts(0, 900, waited=3)) == [0, 1]


def test_cached_tokens_do_not_count():
    """Two prompts of 900 tokens; of the later one 850 are cached."""
    assert served(facts(0, 900), facts(1, 50)) == [1, 0]


def test_requests_of_one_prefix_stay_together():
    mixed = [facts(i, 100, prefix="xy"[i % 2]) for i in range(4)]
    assert served(*mixed) == [0, 2, 1, 3]
    assert served(*(f._replace(prefix=None) for f in mixed)) == [0, 1, 2, 3]


def test_of_equals_the_running_one_goes_first():
    assert served(facts(0, 100, prefix="x"), facts(1, 100, prefix="x", running=True)) == [1, 0]


def test_priority_counts_within_a_tenant_alone():
    assert served(facts(0, priority=1), facts(1)) == [1, 0]
    assert served(facts(0, tenant="a"), facts(1, tenant="b", priority=-9), b=500) == [0, 1]


def test_the_tenant_that_was_served_least_goes_first_in_its_class():
    assert served(facts(0, tenant="a", waited=1.9), facts(1, tenant="b"), a=1000) == [1, 0]
    flood = [facts(i, 100, tenant="a") for i in range(10)]
    assert served(*flood, facts(10, 100, tenant="b"))[:2] == [0, 10]


FACTS = st.builds(
    facts,
    st.integers(0, 10**6),
    st.integers(2, 5000),
    st.floats(0, 10**4),
    st.sampled_from(ServiceClass),
    tenant=st.sampled_from(("", "a", "b")),
    priority=st.integers(-2, 2),
    started=st.booleans(),
    running=st.booleans(),
    promoted=st.booleans(),
    prefix=st.sampled_from((None, "x", "y")),
)


@given(st.lists(FACTS, max_size=30, unique_by=lambda f: f.order), st.randoms(use_true_random=False))
def test_the_order_is_total_and_independent_of_the_input_order(candidates, shuffle):
    order = served(*candidates, a=700)
    assert sorted(order) == sorted(f.order for f in candidates)
    by_order = {f.order: f for f in candidates}
    classes = [(not by_order[o].promoted, by_order[o].slo.rank, not by_order[o].started) for o in order]
    assert classes == sorted(classes)
    shuffle.shuffle(candidates)
    assert served(*candidates, a=700) == order


# -- no request starves ------------------------------------------------------------------------------------


class Queue:
    """Serves one sequence at a time, each for `service` seconds, while every second brings another of the best class
    and the shortest prefill: an overload without an end."""

    def __init__(self, service: int, patient: list[ServiceFacts]):
        self.service = service
        self.waiting = list(patient)
        self.began: dict[int, int] = {}
        self.holder: ServiceFacts | None = None  # the promoted one

    def run(self, seconds: int) -> None:
        running, until = None, 0
        for now in range(seconds):
            self.waiting.append(facts(10_000 + now, 2, waited=-float(now)))  # `waited` at time 0
            if running is not None and now >= until:
                self.holder = None if running is self.holder else self.holder
                running = None
            if running is not None:
                continue
            current = [f._replace(waited=f.waited + now) for f in self.waiting]
            chosen = promote(current, self.holder is not None)
            if chosen is not None:
                self.holder = self.waiting[chosen] = self.waiting[chosen]._replace(promoted=True)
                current[chosen] = current[chosen]._replace(promoted=True)
            running = self.waiting.pop(service_order(current, shares(b=5000))[0])
            self.began[running.order] = now
            until = now + self.service


@examples(25)
@given(
    st.integers(1, 4), st.lists(st.tuples(st.sampled_from(ServiceClass), st.integers(2, 4000)), min_size=1, max_size=4)
)
def test_requests_beyond_their_patience_are_served_by_their_excess(service, asked):
    """The bound: of k others farther beyond, each takes one service; so does what runs already."""
    small = {INTERACTIVE: Target(2.0, 0.1), BATCH: Target(3.0, 0.5), BACKGROUND: Target(6.0, 5.0)}
    patient = [
        facts(i, prefill, slo=c, tenant="b")._replace(target=small[c]) for i, (c, prefill) in enumerate(asked)
    ]  # fmt: skip
    queue = Queue(service, patient)
    queue.run(140)
    stream_patience = PROMOTE_AFTER * TARGETS[INTERACTIVE].ttft
    for f in patient:
        patience = PROMOTE_AFTER * f.target.ttft
        farther = sum(PROMOTE_AFTER * o.target.ttft <= patience for o in patient if o is not f)
        farther += max(0, int(patience - stream_patience) + 1)  # of the stream: those beyond theirs before
        assert queue.began[f.order] <= patience + (farther + 2) * service + 1, (f, queue.began[f.order])


def test_a_request_starves_without_promotions(monkeypatch):
    """The overload above is one: the promise is kept by `promote` alone."""
    monkeypatch.setattr(slo, "PROMOTE_AFTER", float("inf"))
    queue = Queue(1, [facts(0, 4000, slo=BACKGROUND)._replace(target=Target(6.0, 5.0))])
    queue.run(200)
    assert 0 not in queue.began


def test_only_the_most_overdue_request_is_promoted_at_a_time():
    waiting = [facts(0, waited=15.0), facts(1, waited=9.0), facts(2, waited=160.0, slo=BATCH), facts(3, waited=10.0)]
    assert promote(waiting, taken=False) == 2
    assert promote(waiting, taken=True) is None
    assert promote(waiting[1:2], taken=False) is None and promote([], taken=False) is None
    assert promote([facts(7, waited=11.0), facts(4, waited=11.0)], taken=False) == 1, "of equals the first"
    assert served(*waiting[:2], facts(9, 9999, slo=BACKGROUND)._replace(promoted=True)) == [9, 0, 1]


# -- who leaves --------------------------------------------------------------------------------------------


def test_the_victim_goes_by_class_then_share_then_order():
    keys = [
        victim_key(False, INTERACTIVE, 9, 50),
        victim_key(True, BACKGROUND, 9, 60),
        victim_key(False, BATCH, 0, 3),
        victim_key(False, BATCH, 2, 1),
        victim_key(False, BATCH, 2, 2),
    ]
    leaving = sorted(keys, reverse=True)
    assert [(k[1], k[3]) for k in leaving] == [(1, 2), (1, 1), (1, 3), (0, 50), (2, 60)]


def test_a_deadline_is_exact():
    assert not expired(10**9, None)
    assert [expired(w, 2.0) for w in (1.999, 2.0, 2.001)] == [False, True, True]


# -- targets -----------------------------------------------------------------------------------------------


def test_targets_are_read_in_milliseconds():
    targets = slo_targets(EngineOptions("m", slo_batch="1500/20.5"))
    assert targets[BATCH] == Target(1.5, 0.0205)
    assert targets[INTERACTIVE].ttft < targets[BACKGROUND].ttft


@pytest.mark.parametrize("text", ["", "100", "1/2/3", "0/5", "-1/5", "nan/5", "5/inf", "a/b"])
def test_a_malformed_target_is_refused_by_its_name(text):
    with pytest.raises(ConfigError, match="slo_interactive"):
        slo_targets(EngineOptions("m", slo_interactive=text))
