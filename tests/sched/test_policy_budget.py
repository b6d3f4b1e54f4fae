"""The step-time model finds a machine's costs, and the allowance for prefills keeps the decodes' pace on it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.sched.budget import (
    PACE,
    STARVED_STEPS,
    STRETCH,
    BudgetFacts,
    StepLoad,
    StepTime,
    chunk_context,
    count_starved,
    observe,
    predict,
    prefill_seconds,
    step_budget,
)
from tests.examples import examples

WHOLE, BLOCK = 512, 64


@dataclass
class Machine:
    """Seconds of a step: what the model has to find out. `noise` is relative."""

    prefill: float = 8e-4
    row: float = 1.5e-3
    key: float = 2e-8
    step: float = 8e-3
    noise: float = 0.05

    def __post_init__(self):
        self._random = random.Random(7)

    def seconds(self, load: StepLoad) -> float:
        exact = self.step + self.row * load.decode_rows + self.prefill * load.prefill_tokens + self.key * load.context
        return exact * self._random.uniform(1 - self.noise, 1 + self.noise)


def learned(machine: Machine, steps: int = 300) -> StepTime:
    model, draw = StepTime(), random.Random(1)
    for _ in range(steps):
        rows, tokens = draw.randrange(0, 9), draw.choice((0, 0, 64, 200, 500))
        load = StepLoad(rows, tokens, rows * draw.randrange(50, 2000) + chunk_context(0, tokens))
        model = observe(model, load, machine.seconds(load))
    return model


# -- the model ---------------------------------------------------------------------------------------------


def test_the_costs_of_a_machine_are_found():
    machine = Machine()
    model = learned(machine)
    for load in (StepLoad(1, 0, 500), StepLoad(8, 0, 8000), StepLoad(4, 64, 4000), StepLoad(0, 512, 131328)):
        assert predict(model, load) == pytest.approx(replace(machine, noise=0).seconds(load), rel=0.1), load


def test_a_machine_that_changes_is_followed():
    model, slow, load = learned(Machine()), Machine(2.4e-3, 4.5e-3, 6e-8, 24e-3), StepLoad(4, 100, 2000)
    for _ in range(400):
        model = observe(model, load, slow.seconds(load))
    assert predict(model, load) == pytest.approx(replace(slow, noise=0).seconds(load), rel=0.1)


def test_one_odd_step_moves_little_and_an_impossible_one_nothing():
    model, load = learned(Machine()), StepLoad(4, 64, 4000)
    before = predict(model, load)
    for seconds in (3600.0, 1e-9):
        assert predict(observe(model, load, seconds), load) == pytest.approx(before, rel=0.6)
    for seconds in (0.0, -1.0, math.inf, math.nan):
        assert observe(model, load, seconds) is model


def test_a_prefill_is_not_free_before_two_lengths_were_seen():
    model = observe(StepTime(), StepLoad(0, 500, chunk_context(0, 500)), 0.5)
    assert predict(model, StepLoad(0, 250, chunk_context(0, 250))) == pytest.approx(0.25, rel=0.01)


LOADS = st.builds(StepLoad, st.integers(0, 64), st.integers(0, 2048), st.integers(0, 10**7))


@examples(50)
@given(st.lists(st.tuples(LOADS, st.floats(1e-6, 1e4)), min_size=1, max_size=30), LOADS)
def test_costs_are_finite_and_never_negative(steps, load):
    model = StepTime()
    for seen, seconds in steps:
        model = observe(model, seen, seconds)
    assert all(0 <= c < math.inf for c in model.costs)
    more = StepLoad(load.decode_rows + 1, load.prefill_tokens + 1, load.context + 1)
    assert predict(model, load) <= predict(model, more)


def test_a_prefill_in_chunks_pays_for_each_step():
    model = learned(Machine())
    whole, halves = (prefill_seconds(model, 0, 1000, chunk) for chunk in (1000, 500))
    assert halves - whole == pytest.approx(model.costs[3])
    assert prefill_seconds(model, 5000, 100, 100) > prefill_seconds(model, 0, 100, 100)


# -- the allowance -----------------------------------------------------------------------------------------

MODEL = learned(Machine())
FACTS = st.builds(
    BudgetFacts,
    model=st.sampled_from((StepTime(), MODEL, learned(Machine(prefill=1.0)))),
    whole=st.integers(1, 2048),
    block=st.sampled_from((8, 64, 128)),
    decode_rows=st.integers(0, 70),
    decode_context=st.integers(0, 10**6),
    tpot=st.floats(1e-3, 10),
    prefills=st.lists(st.tuples(st.integers(0, 10**5), st.integers(2, 3000)), min_size=1, max_size=5).map(tuple),
    starved_steps=st.integers(0, STARVED_STEPS),
)


@given(FACTS)
def test_the_allowance_is_the_largest_that_keeps_the_pace(facts):
    given = step_budget(facts)
    assert 0 <= given <= facts.whole
    if not facts.decode_rows:
        assert given == facts.whole
    if facts.starved_steps >= STARVED_STEPS - 1:
        assert given >= min(facts.block, facts.whole)
    elif facts.decode_rows:

        def seconds(tokens: int) -> float:
            context, left = facts.decode_context, tokens
            for start, wanted in facts.prefills:
                context += chunk_context(start, min(left, wanted))
                left -= min(left, wanted)
            return predict(facts.model, StepLoad(facts.decode_rows, tokens, context))

        limit = max(PACE * facts.tpot, STRETCH * seconds(0))
        most = max(0, min(facts.whole - facts.decode_rows, sum(wanted for _, wanted in facts.prefills)))
        assert given <= most and seconds(given) <= limit * (1 + 1e-9)
        assert given == most or seconds(given + 1) > limit * (1 - 1e-9)


def run(machine: Machine, tpot: float, steps: int = 400, budget=step_budget) -> tuple[list[float], list[int]]:
    """Four answers decode beside an endless queue of prompts of 2000 tokens: the steps' seconds, and the prompt tokens
    in each."""
    model, starved_steps, start = StepTime(), 0, 0
    seconds, given = [], []
    for step in range(steps):
        rows = 4 if step else 0  # the first step is a prefill alone
        context = rows * (500 + step)
        wanted = 2000 - start
        facts = BudgetFacts(model, WHOLE, BLOCK, rows, context, tpot, ((start, wanted),), starved_steps)
        tokens = min(budget(facts), wanted, WHOLE - rows)
        load = StepLoad(rows, tokens, context + chunk_context(start, tokens))
        seconds.append(machine.seconds(load))
        given.append(tokens)
        model = observe(model, load, seconds[-1])
        starved_steps = count_starved(starved_steps, wanted, tokens, BLOCK)
        start = (start + tokens) % 2000
    return seconds, given


@pytest.mark.parametrize("tpot", [0.03, 0.05, 0.1])
def test_decodes_keep_their_pace_during_prefills(tpot):
    machine = Machine()
    seconds, given = run(machine, tpot)
    late = sum(s > 1.1 * tpot for s in seconds[20:])
    assert late <= 0.02 * len(seconds[20:]), f"{late} steps beyond {tpot}"
    ideal = (PACE * tpot - machine.step - 4 * machine.row) / machine.prefill
    assert sum(given[20:]) / len(given[20:]) >= 0.8 * ideal
    careless, _ = run(machine, tpot, budget=lambda facts: facts.whole)
    assert sum(s > 1.1 * tpot for s in careless) > len(careless) / 2, "without a budget they do not"


def test_a_target_that_cannot_be_kept_does_not_stop_prefills():
    machine = Machine(row=0.05, step=0.1)  # four decodes take 0.3 s alone
    seconds, given = run(machine, tpot=0.05)
    assert max(seconds[20:]) <= STRETCH * 0.3 * 1.3
    assert sum(given[20:]) / len(given[20:]) >= 0.8 * 0.3 / machine.prefill


def test_a_step_that_reads_weights_for_seconds_is_filled():
    """What a step costs whatever it computes is far beyond the target, so rows beside it cost next to nothing."""
    model = learned(Machine(step=4.0, noise=0.02))
    load = StepLoad(32, 0, 32 * 500)
    assert predict(model, load) == pytest.approx(4.0, rel=0.1)
    facts = BudgetFacts(model, 2048, BLOCK, 32, load.context, tpot=0.1, prefills=((0, 1500), (0, 4000)))
    assert step_budget(facts) == 2048 - 32


@pytest.mark.parametrize("prefill", [0.01, 0.1, 10.0])
def test_prefills_get_a_block_in_a_bounded_number_of_steps(prefill):
    _, given = run(Machine(prefill=prefill), tpot=0.03, steps=300)
    bound = STARVED_STEPS**2
    assert all(sum(given[i : i + bound]) >= BLOCK for i in range(len(given) - bound))
