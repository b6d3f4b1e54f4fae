"""The router's cost: more work never costs less, and each policy prefers what it is for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvasir.fleet.cost import AHEAD, POLICIES, ReplicaFacts, choose, cost, first_seconds, prompt_share, saved_seconds
from kvasir.sched.budget import StepTime

MODEL = StepTime((1e-4, 5e-5, 1e-8, 8e-3))
facts = st.builds(
    ReplicaFacts,
    cached=st.integers(0, 5000),
    requests=st.integers(0, 100),
    backlog=st.integers(0, 10**6),
    rows=st.integers(0, 256),
    context=st.integers(0, 10**6),
    model=st.just(MODEL),
)


@given(facts, st.integers(1, 10_000), st.integers(1, 1000))
def test_more_work_before_it_never_costs_less(f, prompt, more):
    assert cost(replace(f, backlog=f.backlog + more), prompt) > cost(f, prompt)
    assume(first_seconds(f, prompt) >= saved_seconds(f))  # else more are spared than the prompts before it would take
    busier = replace(f, rows=f.rows + more, context=f.context + 100 * more)
    assert cost(busier, prompt) >= cost(f, prompt)
    assert cost(f, prompt + more) >= cost(f, prompt)


@given(facts, st.integers(1, 10_000))
def test_what_is_cached_never_costs_more(f, prompt):
    cached = min(f.cached, prompt - 1)  # one token is always computed
    assert cost(replace(f, cached=cached), prompt) <= cost(replace(f, cached=0), prompt) + 1e-9


@given(facts)
def test_prompts_always_get_a_share(f):
    assert 0.5 <= prompt_share(f) <= 1.0


def test_an_empty_replica_takes_what_the_prompt_takes():
    assert first_seconds(ReplicaFacts(model=MODEL), 1000) == pytest.approx(1e-4 * 1000 + 1e-8 * 500_500 + 8e-3)


@given(st.sampled_from(POLICIES), st.lists(facts, min_size=1, max_size=6), st.integers(1, 9999), st.integers(0, 99))
def test_a_choice_is_one_of_them_and_the_same_each_time(policy, all_facts, prompt, turn):
    found = choose(policy, all_facts, prompt, turn)
    assert 0 <= found < len(all_facts)
    assert found == choose(policy, all_facts, prompt, turn)


@given(st.sampled_from(POLICIES), st.integers(1, 6))
def test_equal_replicas_take_turns(policy, count):
    same = [ReplicaFacts(model=MODEL)] * count
    assert [choose(policy, same, 100, turn) for turn in range(count)] == list(range(count))


def test_unmeasured_replicas_take_turns():
    assert [choose("cost", [ReplicaFacts()] * 3, 100, turn) for turn in range(3)] == [0, 1, 2]


def test_each_policy_prefers_what_it_is_for():
    idle, warm = ReplicaFacts(model=MODEL), ReplicaFacts(cached=3000, requests=3, rows=3, context=9000, model=MODEL)
    assert choose("cost", [idle, warm], 4000) == 1
    assert choose("cost", [idle, replace(warm, backlog=50_000)], 4000) == 0
    assert choose("least-busy", [warm, idle], 4000) == 1
    assert choose("dynamo", [replace(idle, backlog=400_000), warm], 4000) == 1
    assert choose("prefix", [idle, warm], 4000) == 1
    assert choose("prefix", [idle, replace(warm, cached=10)], 4000) == 0
    assert choose("prefix", [idle, replace(warm, requests=AHEAD + 1)], 4000) == 0
