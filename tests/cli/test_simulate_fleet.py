"""Simulate, with several engines: answers are whole, a hand-over takes its time, and the coarse simulation agrees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvasir.cli.app import app
from kvasir.cli.simulate import divisions
from kvasir.cli.simulate.coarse import BlockCache, Job
from kvasir.cli.simulate.coarse_router import CoarseRouter
from kvasir.cli.simulate.coarse_scaling import ScaledWorld
from kvasir.cli.simulate.coarse_world import CoarseWorld
from kvasir.cli.simulate.replica import Setup
from kvasir.cli.simulate.report import most_in_time, summarize
from kvasir.cli.simulate.trace import BLOCK, Asked
from kvasir.cli.simulate.world import LATENCY, World
from kvasir.fleet.autoscale import Limits
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


@pytest.mark.parametrize("fleet", FLEETS, ids=str)
def test_coarse_replicas_answer_all_requests(fleet):
    outcome = CoarseWorld(MIXED, replace(SETUP, memory=4000, **fleet)).run()
    for asked, served in zip(MIXED, outcome.served, strict=True):
        assert served is not None and served.done and served.tokens == asked.answer
        assert asked.at <= served.first <= served.last


@pytest.mark.parametrize(
    ("fleet", "gap"), [({"replicas": 1}, 0.15), ({"replicas": 3}, 0.06), ({"prefill": 2, "decode": 1}, 0.08)], ids=str
)
def test_coarse_replicas_take_about_as_long(fleet, gap):
    trace = [Asked(gap * i, 100 + 61 * (i * 7 % 30), 10 + i * 11 % 50) for i in range(150)]
    setup = replace(SETUP, memory=400_000, rows=64, step_tokens=2048, **fleet)
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

    loads, caches = CoarseRouter(SETUP, 3), [BlockCache(room) for _ in range(3)]
    for i, chain in enumerate(prompts):
        loads.keep(i % 3, *caches[i % 3].keep(named(chain)))
        assert len(caches[i % 3]) <= room
    found = named(asked)
    assert loads.cached(found).tolist() == [cache.found(found) for cache in caches]


@settings(max_examples=50)
@given(st.data(), st.integers(1, 5000), st.floats(1, 500))
def test_arrays_of_costs_are_the_costs(data, prompt, answer):
    setup = SETUP
    draw = data.draw(st.lists(st.tuples(*[st.integers(0, 1000)] * 5), min_size=4, max_size=4))
    facts = [
        ReplicaFacts(min(c, prompt - 1), q + r, b, r, k, StepTime(COSTS), setup.target.tpot) for c, q, b, r, k in draw
    ]
    loads = CoarseRouter(setup, 4)
    for i, f in enumerate(facts):

        class Replica:
            num_rows, context, backlog, prompt_pace, now = f.rows, f.context, f.backlog, 0.0, 0.0

        loads.note(i, Replica)  # type: ignore[arg-type]
        loads.requests[i] = f.requests
    cached = np.array([f.cached for f in facts], float)
    found = loads.costs(Asked(0.0, prompt, 1), cached, answer, 0.0)
    assert found == pytest.approx([cost(f, prompt, answer) for f in facts])
    assert loads.blocks(Asked(0.0, prompt, 1), cached).argmin() == choose("dynamo", facts, prompt)


# -- a number of replicas that follows the load --------------------------------------------------------------


BURSTS = [Asked(200.0 * burst + 0.05 * i, 300 + 61 * (i % 7), 20) for burst in range(2) for i in range(60)]


@pytest.mark.parametrize(
    ("limits", "memory"), [(Limits(0, 3, 20.0), 100_000), (Limits(1, 3, 20.0), 2000), (Limits(2, 2), 2000)], ids=str
)
def test_replicas_that_come_and_go_answer_all_requests(limits, memory):
    setup = replace(SETUP, memory=memory, limits=limits, start=2.0)
    outcome = ScaledWorld(BURSTS, setup, limits).run()
    for asked, served in zip(BURSTS, outcome.served, strict=True):
        assert served is not None and served.done and served.tokens == asked.answer
        assert asked.at < served.first <= served.last
    least, most = (outcome.seconds * n for n in (limits.least, limits.most))
    assert least <= outcome.replica_seconds <= most + 1e-6
    assert ScaledWorld(BURSTS, setup, limits).run() == outcome


def test_without_requests_there_is_no_replica_and_the_next_request_waits_for_one():
    limits, trace = Limits(0, 1, 20.0), [Asked(0.0, 100, 2), Asked(500.0, 100, 2)]
    outcome = ScaledWorld(trace, replace(SETUP, limits=limits, start=5.0), limits).run()
    first, second = outcome.served
    assert first and second and first.ttft < 1.0
    assert 5.0 <= second.ttft < 6.0, "it waits for the start"
    assert outcome.replica_seconds < 100, "the replica ended after the delay, or ten times its start"


class Ending(ScaledWorld):
    """Ends one of two replicas at once, whatever runs there."""

    moved = 0

    def _decide(self) -> None:
        if self._count == 2:
            self._target = 1
            self._retire()

    def _taken_from(self, index: int, all: bool) -> list[Job]:
        found = super()._taken_from(index, all)
        self.moved += sum(self._begun(job) for job in found)
        return found


def test_answers_under_way_move_when_their_replica_ends():
    trace = [Asked(0.01 * i, 64, 2000) for i in range(8)]
    world = Ending(trace, replace(SETUP, limits=Limits(2, 2), rows=64), Limits(2, 2))
    outcome = world.run()
    assert world.moved == 4
    assert all(served and served.tokens == 2000 and served.done for served in outcome.served)
    alone = CoarseWorld(trace, replace(SETUP, replicas=1, rows=64)).run()
    assert outcome.seconds == pytest.approx(alone.seconds, rel=0.1), "no answer is begun again"


# -- the command -----------------------------------------------------------------------------------------------


def test_the_goodput_is_the_last_rate_that_is_in_time():
    def served(rate: float) -> dict:
        return {"in_time": 1.0 if rate <= 3.0 else 0.5, "asked_per_s": 10 * rate}

    assert 28.5 < most_in_time(served) <= 30.0
    assert most_in_time(lambda rate: {"in_time": 0.0, "asked_per_s": rate}) == 0.0


@pytest.mark.parametrize("replicas", [2, 5, 10, 1000])
def test_divisions_have_all_replicas(replicas):
    whole, *divided = divisions(replace(SETUP, replicas=replicas))
    assert (whole.prefill, whole.replicas) == (0, replicas)
    assert len({s.prefill for s in divided}) == len(divided) == min(9, replicas - 1)
    assert all(s.prefill > 0 and s.decode > 0 and s.prefill + s.decode == replicas for s in divided)


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
        ("--replicas", "2", "--ratios", "--coarse", "--router", "cost,prefix"),
        ("--min-replicas", "0", "--max-replicas", "2", "--coarse"),
    ],
)
def test_the_command_prints_a_row_for_each_fleet(trace, options):
    result = CliRunner().invoke(app, ["simulate", str(trace), *options])
    assert result.exit_code == 0, result.output
    named = {"--prefill": "1P+1D cost", "--min-replicas": "0-2x cost"}.get(options[0], "2x cost")
    assert named in result.output
    assert ("the most: " in result.output) == ("--ratios" in options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--router", "nearest"), "router 'nearest'"),
        (("--prefill", "1"), "give both"),
        (("--coarse", "--policy", "static"), "--coarse knows only"),
        (("--min-replicas", "1", "--coarse"), "one range"),
        (("--min-replicas", "3", "--max-replicas", "2", "--coarse"), "one range"),
        (("--min-replicas", "1", "--max-replicas", "2"), "coarse replicas"),
        (("--ratios",), "--ratios divides"),
        (("--tpot", "0"), "not a time"),
    ],
)
def test_options_that_do_not_go_together_are_refused(trace, options, message):
    result = CliRunner().invoke(app, ["simulate", str(trace), *options])
    assert result.exit_code != 0 and message in str(result.exception or result.output)
