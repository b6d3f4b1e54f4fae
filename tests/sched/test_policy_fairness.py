"""Tenants get what their weights say, whatever they ask for and whenever they come."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.sched.fairness import GENERATED_COST, PROMPT_COST, Fairness, charge, lead, order, present, tags
from tests.examples import examples

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}


def counters(**values: float) -> Fairness:
    return Fairness(dict(values), dict.fromkeys(values, 1.0))


def test_a_weight_divides_the_cost():
    state = charge(present(Fairness(), WEIGHTS), {"a": (100, 10), "b": (100, 10)})
    cost = 100 * PROMPT_COST + 10 * GENERATED_COST
    assert state.counters == {"a": cost, "b": cost / 2, "c": 0.0}
    assert order(state, ["a", "b", "c"]) == ["c", "b", "a"]
    assert order(present(Fairness(), WEIGHTS), ["c", "a", "b"]) == ["c", "a", "b"], "of equals the first named"


def test_a_transition_leaves_the_old_state_as_it_was():
    before = counters(a=1, b=2)
    charge(before, {"a": (5, 5)})
    present(before, {"c": 1.0})
    assert before == counters(a=1, b=2)


def test_a_new_tenant_starts_at_the_lowest_present_counter():
    state = present(counters(a=500, b=300), {"a": 1, "b": 1, "new": 1})
    assert state.counters["new"] == 300


def test_absence_saves_nothing_up_and_pays_no_debt():
    state = present(counters(a=500, b=300), {"b": 1.0})  # a leaves, ahead
    assert present(state, {"a": 1.0, "b": 1.0}).counters == {"a": 500, "b": 300}
    state = charge(state, {"b": (1000, 0)})  # meanwhile b is served
    assert present(state, {"a": 1.0, "b": 1.0}).counters == {"a": 1300, "b": 1300}
    alone = present(charge(counters(a=0), {"a": (10**6, 0)}), {})  # no tenant is present
    assert present(alone, {"new": 1.0}).counters["new"] == 10**6, "a break of all is no gift to the next"


def test_counters_of_absent_tenants_are_dropped():
    state = counters(a=0)
    for i in range(50):
        state = present(charge(state, {"a": (10, 0)}), {"a": 1.0, f"t{i}": 1.0})
    assert len(present(charge(state, {"a": (10, 0)}), {"a": 1.0}).counters) <= 2


def test_a_lead_is_coarse():
    state = counters(a=0, b=1000, c=5000)
    assert [lead(state, t) for t in "abc"] == [0, 0, 4]


# -- shares ------------------------------------------------------------------------------------------------

SIZES = st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 500)), min_size=1, max_size=20)


@examples(60)
@given(st.tuples(SIZES, SIZES, SIZES), st.tuples(*[st.sampled_from((0.5, 1.0, 3.0))] * 3), st.integers(20, 150))
def test_the_backlogged_get_their_shares_within_one_request(sizes, weights, rounds):
    """Three tenants always have work, with requests of different sizes."""
    share = dict(zip("abc", weights, strict=True))
    asked = dict(zip("abc", sizes, strict=True))
    state, done, served = present(Fairness(), share), defaultdict(int), dict.fromkeys("abc", 0.0)
    largest = max(PROMPT_COST * p + GENERATED_COST * g for s in sizes for p, g in s) / min(weights)
    for _ in range(rounds):
        queue = [(t, asked[t][(done[t] + k) % len(asked[t])]) for t in "abc" for k in range(3)]
        turn = tags(state, [(t, prompt) for t, (prompt, _) in queue])
        tenant, (prompt, generated) = queue[min(range(len(queue)), key=turn.__getitem__)]
        state = charge(state, {tenant: (prompt, generated)})
        served[tenant] += (PROMPT_COST * prompt + GENERATED_COST * generated) / share[tenant]
        done[tenant] += 1
        assert max(served.values()) - min(served.values()) <= largest * (1 + 1e-9)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1000)), max_size=30))
def test_tags_keep_each_tenants_own_order(work):
    state = counters(a=10, b=500, c=0)
    turn = tags(state, work)
    for tenant in "abc":
        own = [t for t, (who, _) in zip(turn, work, strict=True) if who == tenant]
        assert own == sorted(own)
        assert not own or own[0] == state.counters[tenant]
    assert len(turn) == len(work)


def test_a_flood_does_not_push_others_back():
    """One has a hundred requests waiting, the other comes with one: it is next but one at the latest."""
    work = [("flood", 100.0)] * 100 + [("guest", 100.0)]
    state = present(Fairness(), {"flood": 1.0, "guest": 1.0})
    turn = tags(state, work)
    by_turn = sorted(range(len(work)), key=turn.__getitem__)
    assert by_turn.index(100) <= 1


@pytest.mark.parametrize("away", [1, 50])
def test_leaving_and_coming_back_gains_nothing(away):
    """A tenant that comes and goes is served no more than one that stays, within one request."""
    state, served = present(Fairness(), {"stays": 1.0, "goes": 1.0}), dict.fromkeys(("stays", "goes"), 0)
    for step in range(400):
        here = {"stays": 1.0} if step // away % 2 else {"stays": 1.0, "goes": 1.0}
        state = present(state, here)
        first = order(state, here)[0]
        state = charge(state, {first: (100, 0)})
        served[first] += 100
    assert served["goes"] <= served["stays"] + 100
    floors = [0.0]
    for _ in range(5):
        state = present(charge(state, {order(state, state.weights)[0]: (1, 0)}), {"stays": 1.0, "x": 1.0})
        floors.append(state.floor)
    assert all(a <= b for a, b in pairwise(floors))
