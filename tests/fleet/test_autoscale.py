"""How many replicas a fleet should have: bounded, monotone in the load, and steady."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvasir.fleet.autoscale import HIGH, LATEST, LOW, SOONEST, WORTH, FleetFacts, Limits, Past, capacity, decide, needed
from kvasir.sched.budget import StepTime

TICK = 0.5  # seconds between two decisions
counts = st.integers(0, 8)
seconds = st.floats(0, 1000)


@st.composite
def limits(draw) -> Limits:
    least = draw(st.integers(0, 4))
    return Limits(least, draw(st.integers(max(1, least), 8)), draw(st.floats(0, 600)))


facts = st.builds(
    FleetFacts,
    replicas=counts,
    requests=st.integers(0, 50),
    rows=st.integers(0, 200),
    capacity=st.integers(1, 32),
    backlog=st.floats(0, 1e9),
    ttft=st.floats(0.01, 100),
    in_time=st.floats(0, 1),
    idle=seconds,
    start=st.floats(0, 100),
)
pasts = st.builds(Past, counts, counts, seconds, seconds, st.sampled_from((1.0, 2.0, 8.0)))


def course(within: Limits, f: FleetFacts, ticks: int) -> list[int]:
    """The numbers of replicas under facts that only get older."""
    past, found = Past(), [f.replicas]
    for _ in range(ticks):
        count, past = decide(within, f, past, TICK)
        f = replace(f, replicas=count, idle=0.0 if f.requests else f.idle + TICK)
        found.append(count)
    return found


@given(limits(), facts, pasts, seconds)
def test_decisions_are_within_the_limits(within, f, past, passed):
    low, high = needed(within, f)
    assert within.least <= low <= high <= within.most
    f = replace(f, replicas=min(f.replicas, within.most))
    count, _ = decide(within, f, past, passed)
    assert within.least <= count <= within.most


@given(limits(), facts, pasts, seconds, st.integers(0, 50), st.integers(0, 100), st.floats(0, 1e6), st.floats(0, 1))
def test_more_load_never_means_fewer_replicas(within, f, past, passed, requests, rows, backlog, late):
    heavier = replace(
        f,
        requests=f.requests + requests,
        rows=f.rows + rows,
        backlog=f.backlog + backlog,
        in_time=f.in_time * (1 - late),
    )
    for light, heavy in zip(needed(within, f), needed(within, heavier), strict=True):
        assert light <= heavy
    assert decide(within, f, past, passed)[0] <= decide(within, heavier, past, passed)[0]


@given(limits(), facts)
def test_constant_load_moves_the_number_one_way_and_then_never(within, f):
    f = replace(f, replicas=min(f.replicas, within.most))
    pause = max(8 * within.delay, WORTH * f.start, LATEST)
    within = replace(within, delay=within.delay / max(1.0, pause / 20))  # few ticks, in the same proportions
    f = replace(f, start=min(f.start, 2.0), idle=0.0)
    found = course(within, f, 2000)
    steps = [b - a for a, b in itertools.pairwise(found) if a != b]
    starts = f.replicas < within.least  # those that must be there are started whatever the load
    assert all(s > 0 for s in steps[starts:]) or all(s < 0 for s in steps[starts:])
    assert len(set(found[-500:])) == 1


def test_more_replicas_come_once_a_start_would_have_paid():
    within = Limits(1, 8)
    for start, expected in ((0.1, SOONEST), (3.0, 3.0), (60.0, LATEST)):
        f = FleetFacts(replicas=1, requests=40, rows=40, capacity=10, start=start)
        found = course(within, f, 40)
        after = found.index(5)  # 40 / 10 / HIGH
        assert set(found) == {1, 5} and expected <= (after - 1) * TICK < expected + 2 * TICK


def test_a_short_peak_starts_nothing():
    past, f = Past(), FleetFacts(replicas=1, requests=1, rows=1, capacity=10, start=3.0)
    for tick in range(200):
        peak = replace(f, requests=40, rows=40) if tick % 5 else f
        count, past = decide(Limits(0, 8), peak, past, TICK)
        assert count == 1


def test_replicas_end_only_after_the_delay_and_not_below_what_was_needed_meanwhile():
    within = Limits(0, 8, delay=60.0)
    past, f, found = Past(), FleetFacts(replicas=6, requests=10, rows=10, capacity=10), []
    for tick in range(200):
        rows = 15 if tick == 50 else 10  # 3 replicas by LOW, else 2
        count, past = decide(within, replace(f, requests=rows, rows=rows), past, TICK)
        f = replace(f, replicas=count)
        found.append(count)
    assert found[:120] == [6] * 120 and found[121] == 3 and LOW * 3 >= 1.5


def test_to_zero_after_the_idle_time_and_back_at_once():
    within = Limits(0, 4, delay=60.0)
    found = course(within, FleetFacts(replicas=3, capacity=4, start=1.0), 200)
    assert found[119] == 3 and found[-1] == 0 and sorted(set(found)) in ([0, 3], [0, 1, 3])
    assert course(Limits(0, 4, delay=5.0), FleetFacts(replicas=1, start=6.0), 200).index(0) >= WORTH * 6 / TICK
    assert set(course(replace(within, least=2), FleetFacts(replicas=3), 1000)) == {3, 2}
    f = FleetFacts(replicas=0, requests=1, rows=1, capacity=4, start=30.0)
    assert decide(within, f, Past(), 0.0)[0] == 1
    assert decide(within, replace(f, requests=9, rows=9), Past(), 0.0)[0] == 3


def test_late_first_tokens_ask_for_one_more_and_keep_what_there_is():
    within = Limits(1, 8, delay=10.0)
    f = FleetFacts(replicas=2, requests=5, rows=5, capacity=100, in_time=0.5)
    assert needed(within, f) == (3, 3)
    assert needed(within, replace(f, in_time=1.0)) == (1, 1)
    assert needed(within, replace(f, requests=1, rows=1)) == (1, 2), "another replica would have nothing to do"


def test_replicas_that_are_missed_soon_after_their_end_stay_longer():
    """Two replicas have so little load that one ends; alone it has too much."""
    within, past, n, ends = Limits(1, 2, delay=60.0), Past(), 1, []
    for tick in range(8000):
        rows = {1: 9, 2: 5}[n]
        count, past = decide(within, FleetFacts(n, rows, rows, 10), past, TICK)
        if count < n:
            ends.append(tick)
        n = count
    gaps = [b - a for a, b in itertools.pairwise(ends)]
    assert gaps == sorted(gaps) and gaps[-1] > 7 * 60 / TICK


@given(st.floats(0, 0.1), st.floats(0, 1e-4), st.floats(0, 1), st.floats(0, 5000), st.floats(0.001, 1))
def test_a_replicas_capacity_is_what_meets_the_target(row, key, step, context, tpot):
    model = StepTime((1e-3, row, key, step))
    found = capacity(model, context, tpot, 64)
    assert 1 <= found <= 64
    each = row + key * context
    bound = max(0.9 * tpot, 2 * (step + each))
    assert step + found * each <= bound * (1 + 1e-9)
    assert found == 64 or step + (found + 1) * each >= bound * (1 - 1e-9)
    assert HIGH > LOW
