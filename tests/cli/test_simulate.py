"""Simulate: virtual time that adds up, hits that are all there are, and files from outside that are refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvasir.cli.app import app
from kvasir.cli.simulate import prefix, read_costs
from kvasir.cli.simulate.adapters import AdapterSetup, SimulatedAdapters
from kvasir.cli.simulate.calibrate import fit, foresee, measure
from kvasir.cli.simulate.replica import POLICIES, Setup
from kvasir.cli.simulate.report import summarize
from kvasir.cli.simulate.trace import BLOCK, Asked, Prompts, ideal_hits, read_trace
from kvasir.cli.simulate.world import World
from kvasir.engine.core import EngineCore
from kvasir.errors import ConfigError
from kvasir.runner.fake import FakeRunner
from kvasir.sched.budget import StepLoad, StepTime, predict
from kvasir.sched.scheduler import Scheduler

COSTS = (1e-4, 5e-5, 1e-8, 8e-3)
SETUP = Setup("ours", COSTS, memory=100_000, rows=16, step_tokens=512)
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47.6805900,9,0\n"


def shared(*names: tuple[int, ...], length: int = 0, gap: float = 1.0) -> list[Asked]:
    """A request for each tuple of blocks, all of whole blocks."""
    return [Asked(i * gap, length or BLOCK * len(n), 3, n) for i, n in enumerate(names)]


# -- virtual time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_one_request_alone_takes_what_its_steps_cost(policy):
    outcome = World([Asked(0.0, 100, 3)], replace(SETUP, policy=policy)).run()
    [served] = outcome.served
    assert served is not None and served.done and served.tokens == 3
    first = predict(StepTime(COSTS), StepLoad(0, 100, 100 * 101 // 2))
    assert served.ttft == pytest.approx(first)
    later = sum(predict(StepTime(COSTS), StepLoad(1, 0, 101 + i)) for i in range(2))
    assert served.tpot == pytest.approx(later / 2)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_answers_all_requests_in_full(policy):
    trace = [Asked(0.1 * i, 50 + 37 * i, 1 + i % 5) for i in range(40)]
    outcome = World(trace, replace(SETUP, policy=policy, memory=4000)).run()
    for asked, served in zip(trace, outcome.served, strict=True):
        assert served is not None and served.done and served.tokens == asked.answer
        assert asked.at <= served.first <= served.last
    assert outcome.counts["generated_tokens"] == sum(a.answer for a in trace)


def test_static_batches_do_not_overlap_and_fcfs_keeps_the_order():
    trace = [Asked(0.0, 100, 20 + 30 * (i % 4)) for i in range(12)]
    static = World(trace, replace(SETUP, policy="static", rows=4)).run().served
    for before, after in pairwise([static[i : i + 4] for i in range(0, 12, 4)]):
        assert max(s.last for s in before if s) <= min(s.first for s in after if s)
    fcfs = World(trace, replace(SETUP, policy="fcfs", rows=4)).run().served
    firsts = [s.first for s in fcfs if s]
    assert firsts == sorted(firsts) and len(firsts) == 12
    assert max(s.last for s in fcfs if s) < max(s.last for s in static if s), "rows stood empty in the batches"


def test_chunks_keep_the_pace_that_whole_prompts_break():
    trace = [Asked(0.0, 20, 200), *(Asked(0.5 + i, 6000, 2) for i in range(2))]
    setup = replace(SETUP, step_tokens=2048)
    gaps = {p: summarize(s := replace(setup, policy=p), World(trace, s).run())["in_time"] for p in ("ours", "fcfs")}
    assert gaps["ours"] == 1.0
    slow = World(trace, replace(setup, policy="fcfs")).run().served[1]
    assert slow is not None and slow.ttft < World(trace, setup).run().served[1].ttft  # type: ignore[union-attr]


def test_a_full_queue_refuses_requests_and_counts_them():
    trace = [Asked(0.0, 100, 5) for _ in range(30)]
    for policy in POLICIES:
        setup = replace(SETUP, policy=policy, max_waiting=10)
        row = summarize(setup, World(trace, setup).run())
        assert row["refused"] == 20 and row["requests"] == 30 and row["in_time"] <= 1 / 3


def test_a_rate_makes_them_come_sooner():
    trace = [Asked(float(i), 10, 1) for i in range(5)]
    outcome = World(trace, replace(SETUP, rate=4.0)).run()
    assert [s.arrived for s in outcome.served if s] == [0.0, 0.25, 0.5, 0.75, 1.0] and outcome.span == 1.0


@pytest.mark.parametrize("policy", POLICIES)
def test_adapters_are_loaded_in_virtual_time(policy):
    trace = [Asked(0.01 * i, 30, 4) for i in range(120)]
    setup = replace(SETUP, policy=policy, adapters=AdapterSetup(40, room=8, seconds=0.2))
    outcome = World(trace, setup).run()
    assert all(served is not None and served.done for served in outcome.served)
    used = {SimulatedAdapters(setup.adapters, lambda: 0.0).of(i)[0].name for i in range(120)}
    assert outcome.counts["loads"] >= len(used) > 8
    assert outcome.counts["unloads"] >= len(used) - 8
    assert outcome.seconds >= 0.2 * len(used), "one is loaded at a time"
    ample = World(trace, replace(setup, adapters=AdapterSetup(40, room=40, seconds=0.2))).run()
    assert ample.counts["loads"] == len(used) and ample.counts["unloads"] == 0
    assert World(trace, setup).run().counts == outcome.counts


def test_a_request_waits_for_its_adapter_alone():
    setup = replace(SETUP, adapters=AdapterSetup(1, seconds=3.0))
    [first, second] = World([Asked(0.0, 10, 2), Asked(1.0, 10, 2)], setup).run().served
    assert first is not None and second is not None and 3.0 < first.ttft < 3.1 and 2.0 < second.ttft < 2.1
    late = World([Asked(0.0, 10, 2), Asked(9.0, 10, 2)], setup).run().served[1]
    assert late is not None and late.ttft < 0.1, "it is in memory"


# -- hits --------------------------------------------------------------------------------------------------


def brute_ideal(trace: list[Asked]) -> int:
    prompts, hits = Prompts(trace), 0
    texts = [prompts.ids(i) for i in range(len(trace))]
    for i, text in enumerate(texts):
        hits += max((_common(text, other) for other in texts[:i]), default=0)
    return hits


def _common(text: tuple, other: tuple) -> int:
    same = next((k for k, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    return min(same, len(text) - 1)


chains = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@given(st.lists(st.tuples(chains, st.integers(1, BLOCK)), min_size=1, max_size=12))
def test_the_ideal_is_what_comparing_all_prompts_gives(drawn):
    trace = [Asked(float(i), BLOCK * (len(c) - 1) + rest, 1, tuple(c)) for i, (c, rest) in enumerate(drawn)]
    assert ideal_hits(trace) == brute_ideal(trace)


def test_an_endless_cache_finds_all_and_a_small_one_less():
    chats = [(c, *range(100 * c, 100 * c + turn)) for turn in range(1, 8) for c in range(1, 6)]
    trace = shared(*chats)
    ideal = ideal_hits(trace)
    assert ideal > 0
    found = [
        prefix.hits(trace, size, 64, ideal, lambda done: None)["of_ideal"] for size in (5000, prefix.endless(trace, 64))
    ]
    assert found[1] >= 0.999 and found[0] < 0.9 * found[1]


# -- what comes from outside -------------------------------------------------------------------------------


def test_azure_is_read_with_its_seven_digits(tmp_path):
    (tmp_path / "a.csv").write_text(AZURE)
    assert read_trace(tmp_path / "a.csv") == [Asked(0.0, 374, 44), Asked(1.0, 9, 1)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "x"),
        ("a.csv", ""),
        ("a.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3\n"),
        ("a.csv", AZURE.replace("374", "-1")),
        ("a.csv", AZURE.replace("374", "9" * 30)),
        ("a.csv", AZURE.replace("2023-11-16 18", "noon")),
        ("a.jsonl", "{"),
        ("a.jsonl", "[" * 100_000),
        ("a.jsonl", '{"timestamp": 1e400, "input_length": 1, "output_length": 1, "hash_ids": [1]}'),
        ("a.jsonl", '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}'),
        ("a.jsonl", '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [-1]}'),
        ("a.jsonl", '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ["1"]}'),
        ("a.jsonl", '{"timestamp": 0, "input_length": "1", "output_length": 1, "hash_ids": [1]}'),
        ("a.jsonl", '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": 7}'),
        ("a.jsonl", "3"),
    ],
)
def test_a_malformed_trace_is_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError):
        read_trace(tmp_path / name)


def test_costs_from_numbers_and_from_a_file(tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"costs": COSTS}))
    assert read_costs("1e-4,5e-5,1e-8,8e-3") == COSTS == read_costs(str(file))
    for bad in ("1,2,3", "0,0,0,0", "1,2,3,-1", "1,2,3,nan", "1,2,3,x", str(tmp_path / "absent")):
        with pytest.raises(ConfigError):
            read_costs(bad)


# -- the commands ------------------------------------------------------------------------------------------


def test_the_command_prints_a_row_a_run_and_writes_files(tmp_path):
    (tmp_path / "a.csv").write_text(AZURE)
    args = ["simulate", str(tmp_path / "a.csv"), "--rate", "1,2", "--policy", "all", "--out", str(tmp_path)]
    reply = CliRunner().invoke(app, args)
    assert reply.exit_code == 0, reply.output
    [file] = tmp_path.glob("simulate-a-*.json")
    rows = json.loads(file.read_text())["rows"]
    assert [(r["policy"], r["rate"]) for r in rows] == [(p, r) for p in POLICIES for r in (1.0, 2.0)]
    assert all(p in reply.output for p in POLICIES) and " loads" not in reply.output
    reply = CliRunner().invoke(app, ["simulate", str(tmp_path / "a.csv"), "--adapters", "3", "--zipf", "0.5"])
    assert reply.exit_code == 0 and " loads" in reply.output


@pytest.mark.parametrize(
    "more",
    [
        *(["--policy", "luck"], ["--rate", "0"], ["--memory", "100"], ["--costs", "1,2"], ["--costs", "x,1,1,1"]),
        *(["--zipf", "nan"], ["--lora-seconds", "0"], ["--lora-seconds", "inf"]),
    ],
)
def test_the_command_refuses(tmp_path, more):
    (tmp_path / "a.csv").write_text(AZURE)
    reply = CliRunner().invoke(app, ["simulate", str(tmp_path / "a.csv"), *more])
    assert isinstance(reply.exception, ConfigError)


def test_bench_prefix_on_a_trace(tmp_path):
    line = '{"timestamp": %d, "input_length": 1024, "output_length": 2, "hash_ids": [1, %d]}\n'
    (tmp_path / "m.jsonl").write_text("".join(line % (1000 * i, 2 + i % 2) for i in range(6)))
    args = ["bench", "prefix", "--trace", str(tmp_path / "m.jsonl"), "--memory", "3000", "--out", str(tmp_path)]
    reply = CliRunner().invoke(app, args)
    assert reply.exit_code == 0, reply.output
    [file] = tmp_path.glob("prefix-m-*.json")
    reported = json.loads(file.read_text())
    assert reported["ideal_hit_tokens"] == 512 + 4 * 1023
    assert [r["of_ideal"] for r in reported["rows"]][-1] == 1.0 and len(reported["rows"]) == 2


# -- calibration -------------------------------------------------------------------------------------------


def test_a_fit_finds_the_costs_of_a_machine_that_keeps_to_them():
    truth = StepTime(COSTS)
    loads = [StepLoad(i % 9, 64 * (i % 7), 500 * (i % 11) + i) for i in range(1, 300)]
    found = fit([(load, predict(truth, load)) for load in loads])
    assert found.costs == pytest.approx(COSTS, rel=0.05) and found.p90_error < 0.01
    odd = fit([(load, predict(truth, load) * (1 if i % 5 else 10)) for i, load in enumerate(loads)])
    assert odd.costs == pytest.approx(COSTS, rel=0.1) and odd.median_error < 0.05, "a step in five does not lead astray"
    draw = random.Random(0)
    wrong = fit([(load, predict(truth, load) * draw.uniform(1, 2)) for load in loads])
    assert wrong.median_error > 0.1, "noise of that size shows"


def test_steps_of_a_real_core_are_measured():
    fake = FakeRunner(max_model_len=256, num_blocks=200)
    core = EngineCore(fake, Scheduler(fake.capacity))
    measured = measure(core)
    assert len(measured) > 100 and all(seconds > 0 for _, seconds in measured)
    assert any(load.prefill_tokens for load, _ in measured) and any(load.decode_rows > 4 for load, _ in measured)
    assert any(load.prefill_tokens and load.decode_rows for load, _ in measured), "beside each other"
    assert len({load for load, _ in measured}) == len(measured) and core.scheduler.service.step_time == StepTime()


def test_a_run_is_measured_and_foreseen():
    """On a machine whose steps take what the costs say, but for what planning them takes."""
    costs = (0.0, 0.0, 0.0, 0.004)
    fake = FakeRunner(max_model_len=256, num_blocks=200, step_seconds=0.004)
    run = foresee(EngineCore(fake, Scheduler(fake.capacity)), costs, requests=6)
    assert run.keys() == {"ttft_p50_s", "ttft_p90_s", "tpot_p50_s", "tpot_p90_s", "tokens_per_s"}
    assert run["tpot_p50_s"][1] == pytest.approx(0.004)
    assert run["tpot_p50_s"][0] >= 0.004, "a step sleeps as long"
