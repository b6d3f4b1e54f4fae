"""Simulate, with several engines: answers are whole, a hand-over takes its time, and the coarse simulation agrees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvasir.cli.app import app
from kvasir.cli.simulate.coarse import BlockCache
from kvasir.cli.simulate.coarse_world import CoarseWorld, Loads
from kvasir.cli.simulate.replica import Setup
from kvasir.cli.simulate.report import most_in_time, summarize
from kvasir.cli.simulate.trace import BLOCK, Asked
from kvasir.cli.simulate.world import LATENCY, World
from kvasir.fleet.cost import POLICIES, ReplicaFacts, choose, cost
from kvasir.sched.budget import StepLoad, StepTime, predict

COSTS = (1e-4, 5e-5, 1e-8, 8e-3)
SETUP = Setup("ours", COSTS, memory=100_000, rows=16, step_tokens=512)
MIXED = [Asked(0.02 * i, 50 + 37 * (i % 20), 1 + i % 9) for i in range(80)]
FLEETS = [{"replicas": 3, "router": router} for router in POLICIES] + [{"prefill": 1, "decode": 2}]
CHATS = [
    Asked(2.0 * t + 0.3 * c, BLOCK * t, 20, (c, *range(100 * c, 100 * c + t - 1)))
    for t in range(1, 9)
    for c in range(8)
]


@pytest.mark.parametrize("fleet", FLEETS, ids=str)
def test_every_fleet_answers_all_requests_in_full(fleet):
    outcome = World(MIXED, replace(SETUP, memory=4000, **fleet)).run()
    for asked, served in zip(MIXED, outcome.served, strict=True):
        assert served is not None and served.done and served.tokens == asked.answer
        assert asked.at <= served.first <= served.last
    again = World(MIXED, replace(SETUP, memory=4000, **fleet)).run()
    assert again == outcome


def test_two_replicas_compute_at_the_same_time():
    trace = [Asked(0.0, 400, 4) for _ in range(2)]
    one, two = (World(trace, replace(SETUP, replicas=n)).run().seconds for n in (1, 2))
    assert two < 0.8 * one


@pytest.mark.parametrize("transfer", [0.0, 1e-3])
def test_a_hand_over_takes_its_transfer(transfer):
    asked = Asked(0.0, 5 * 64 + 1, 3)
    [served] = World([asked], replace(SETUP, prefill=1, decode=1, transfer=transfer)).run().served
    assert served is not None
    compute = predict(StepTime(COSTS), StepLoad(0, asked.prompt, asked.prompt * (asked.prompt + 1) // 2))
    assert served.first == pytest.approx(compute)
    arrived = max(compute, asked.prompt * transfer) + LATENCY
    steps = predict(StepTime(COSTS), StepLoad(0, 2, 322 + 321)) + predict(StepTime(COSTS), StepLoad(1, 0, 323))
    assert served.last == pytest.approx(arrived + steps), "the receiver computes the tokens after the last whole block"


def test_pushed_blocks_are_not_computed_again():
    trace = [Asked(float(i), 640, 2) for i in range(4)]
    world = World(trace, replace(SETUP, prefill=1, decode=1))
    world.run()
    [back] = world.backs
    assert back.scheduler.cached_tokens == 4 * 640, "all but the first token of each answer"
    assert world.outcome.counts["cached_tokens"] == 0, "hits are those of prompts"
    assert back.pushed is not None and not back.pushed._held, "what was pushed is used or dropped"


def test_routers_that_know_the_caches_hit_more():
    hits = {
        router: summarize(s := replace(SETUP, replicas=3, router=router), World(CHATS, s).run())["hit_rate"]
        for router in ("cost", "prefix", "round-robin")
    }
    assert hits["cost"] > 1.5 * hits["round-robin"] and hits["prefix"] > 1.5 * hits["round-robin"]


# -- coarse --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("router", POLICIES)
def test_coarse_replicas_answer_all_requests(router):
    outcome = CoarseWorld(MIXED, replace(SETUP, replicas=3, router=router, memory=4000)).run()
    for asked, served in zip(MIXED, outcome.served, strict=True):
        assert served is not None and served.done and served.tokens == asked.answer
        assert asked.at <= served.first <= served.last


@pytest.mark.parametrize(("replicas", "gap"), [(1, 0.15), (3, 0.06)])
def test_coarse_replicas_take_about_as_long(replicas, gap):
    trace = [Asked(gap * i, 100 + 61 * (i * 7 % 30), 10 + i * 11 % 50) for i in range(150)]
    setup = replace(SETUP, replicas=replicas, memory=400_000, rows=64, step_tokens=2048)
    exact, coarse = (summarize(setup, world(trace, setup).run()) for world in (World, CoarseWorld))
    for name in ("ttft_p50_s", "tpot_p50_s", "goodput_per_s", "seconds"):
        assert coarse[name] == pytest.approx(exact[name], rel=0.3), name


def test_coarse_replicas_hit_as_much():
    setup = replace(SETUP, replicas=3)
    exact, coarse = (summarize(setup, world(CHATS, setup).run())["hit_rate"] for world in (World, CoarseWorld))
    assert coarse == pytest.approx(exact, rel=0.2)


chains = st.lists(st.integers(0, 20), min_size=1, max_size=5, unique=True).map(tuple)


@given(st.lists(chains, max_size=30), st.integers(1, 12), chains)
def test_a_router_knows_what_each_replica_keeps(prompts, room, asked):
    """Blocks as in a trace: a block's name stands for its whole prefix."""
    names: dict[tuple[int, ...], int] = {}

    def named(chain: tuple[int, ...]) -> Asked:
        blocks = tuple(names.setdefault(chain[: i + 1], len(names)) for i in range(len(chain)))
        return Asked(0.0, BLOCK * len(chain), 1, blocks)

    loads, caches = Loads(replace(SETUP, replicas=3)), [BlockCache(room) for _ in range(3)]
    for i, chain in enumerate(prompts):
        loads.keep(i % 3, *caches[i % 3].keep(named(chain)))
        assert len(caches[i % 3]) <= room
    found = named(asked)
    assert loads.cached(found).tolist() == [cache.found(found) for cache in caches]


@settings(max_examples=50)
@given(st.data(), st.integers(1, 5000), st.floats(1, 500))
def test_arrays_of_costs_are_the_costs(data, prompt, answer):
    setup = replace(SETUP, replicas=4)
    draw = data.draw(st.lists(st.tuples(*[st.integers(0, 1000)] * 5), min_size=4, max_size=4))
    facts = [
        ReplicaFacts(min(c, prompt - 1), q + r, b, r, k, StepTime(COSTS), setup.target.tpot) for c, q, b, r, k in draw
    ]
    loads = Loads(setup)
    for i, f in enumerate(facts):

        class Replica:
            num_rows, context, backlog, prompt_pace, now = f.rows, f.context, f.backlog, 0.0, 0.0

        loads.note(i, Replica)  # type: ignore[arg-type]
        loads.requests[i] = f.requests
    cached = np.array([f.cached for f in facts], float)
    found = loads.costs(Asked(0.0, prompt, 1), cached, answer, 0.0)
    assert found == pytest.approx([cost(f, prompt, answer) for f in facts])
    assert loads.blocks(Asked(0.0, prompt, 1), cached).argmin() == choose("dynamo", facts, prompt)


# -- the command -----------------------------------------------------------------------------------------------


def test_the_goodput_is_the_last_rate_that_is_in_time():
    def served(rate: float) -> dict:
        return {"in_time": 1.0 if rate <= 3.0 else 0.5, "asked_per_s": 10 * rate}

    assert 28.5 < most_in_time(served) <= 30.0
    assert most_in_time(lambda rate: {"in_time": 0.0, "asked_per_s": rate}) == 0.0


@pytest.fixture
def trace(tmp_path):
    rows = "".join(f"2023-11-16 18:15:{10 + i}.0000000,{100 + 10 * i},{1 + i}\n" for i in range(20))
    path = tmp_path / "a.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    return path


@pytest.mark.parametrize(
    "options",
    [
        ("--replicas", "2", "--router", "all"),
        ("--replicas", "2", "--coarse", "--goodput"),
        ("--prefill", "1", "--decode", "1"),
    ],
)
def test_the_command_prints_a_row_for_each_fleet(trace, options):
    result = CliRunner().invoke(app, ["simulate", str(trace), *options])
    assert result.exit_code == 0, result.output
    assert ("1P+1D cost" if "--prefill" in options else "2x cost") in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--router", "nearest"), "router 'nearest'"),
        (("--prefill", "1"), "give both"),
        (("--coarse", "--policy", "static"), "--coarse knows only"),
    ],
)
def test_options_that_do_not_go_together_are_refused(trace, options, message):
    result = CliRunner().invoke(app, ["simulate", str(trace), *options])
    assert result.exit_code != 0 and message in str(result.exception or result.output)
