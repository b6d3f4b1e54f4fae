"""bench prefix: users share the stated prefixes, pools hold a round, and choices must be equal."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvasir.cli.app import app
from kvasir.cli.bench.prefix import check_equal, measure_rounds, ratio_to, rotated
from kvasir.cli.bench.probe import Probe
from kvasir.cli.bench.workloads import BRANCHES, LEVELS, LONG, TURNS, WORKLOADS, Exchange, Load, blocks_needed, play
from kvasir.engine.fake import FakeEngine
from kvasir.engine.front import Front
from kvasir.errors import ConfigError, InvalidRequest, KvasirError

USERS, TURN, ANSWER, BLOCK = 2, 8, 4, 16
VOCABULARY = 100_000  # so large that nothing is shared by chance
LOADS = st.builds(Load, users=st.integers(1, 3), turn=st.integers(1, 12), answer=st.integers(1, 9))


async def played(name: str, load: Load, number: int = 0) -> list[Exchange]:
    """With answers that no two requests share."""
    given = 0

    async def answer(exchange: Exchange) -> None:
        nonlocal given
        for _ in range(exchange.n):
            exchange.answers.append(tuple(range(VOCABULARY + given, VOCABULARY + given + load.answer)))
            given += load.answer

    return await play(name, load, VOCABULARY, number, answer)


def begin_alike(a: Exchange, b: Exchange) -> int:
    """Leading ids that two prompts share."""
    return next((i for i, (x, y) in enumerate(zip(a.prompt, b.prompt, strict=False)) if x != y), len(a.prompt))


# -- what is asked -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
async def test_a_round_is_the_same_each_time_and_no_other(name):
    load = Load(USERS, TURN, ANSWER)
    first, again, other = await played(name, load), await played(name, load), await played(name, load, 1)
    assert first == again and len(first) == len(other)
    assert {e.prompt[0] for e in first}.isdisjoint(e.prompt[0] for e in other)


@given(load=LOADS)
async def test_users_of_a_round_share_their_prefix(load):
    header = LONG * load.turn
    for name in ("few-shot", "agents"):
        exchanges = await played(name, load)
        assert len(exchanges) == load.users * TURNS
        assert all(e.prompt[:header] == exchanges[0].prompt[:header] for e in exchanges), "one header for all"
    few = await played("few-shot", load)
    assert {len(e.prompt) for e in few} == {header + load.turn}
    for name, grown in (("multi-turn", 1), ("agents", 2)):
        exchanges = await played(name, load)
        for before, after in pairwise(exchanges):
            if len(after.prompt) > len(before.prompt):  # of the same user
                assert after.prompt[: len(before.prompt) + load.answer] == before.prompt + before.answers[0]
                assert len(after.prompt) == len(before.prompt) + load.answer + grown * load.turn


@given(load=LOADS)
async def test_a_tree_extends_every_thought(load):
    exchanges = await played("tree-of-thought", load)
    nodes = sum(BRANCHES**level for level in range(LEVELS))
    assert len(exchanges) == load.users * nodes and {e.n for e in exchanges} == {BRANCHES}
    thoughts = {e.prompt + answer for e in exchanges for answer in e.answers}
    roots = [e for e in exchanges if e.prompt not in thoughts]
    assert len(roots) == load.users and all(len(e.prompt) == LONG * load.turn for e in roots)
    assert len({e.prompt for e in exchanges}) == len(exchanges), "no node twice"


async def test_prompts_without_reuse_share_no_prefix():
    exchanges = await played("no-reuse", Load(4, TURN, ANSWER))
    assert not any(begin_alike(a, b) for i, a in enumerate(exchanges) for b in exchanges[:i])


@given(load=LOADS, block_size=st.sampled_from((8, 16, 64)))
async def test_blocks_of_a_round_where_nothing_is_shared(load, block_size):
    requests, one = load.users * TURNS, -(-(LONG * load.turn + load.answer) // block_size)
    assert await blocks_needed("no-reuse", load, block_size) == requests * (one + 1)


# -- the report --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_on_the_real_model(tmp_path):
    shape = f"--num-prompts {USERS} --input-len {TURN} --output-len {ANSWER} --block-size {BLOCK}"
    places = ["--out", str(tmp_path / "out"), "--cache-dir", str(tmp_path)]
    args = ["bench", "prefix", "kvasir-mini", *shape.split(), "--repeats", "1", "--threads", "1", *places]
    reply = CliRunner().invoke(app, args)
    assert reply.exit_code == 0, reply.output
    [file] = (tmp_path / "out").glob("prefix-kvasir-mini-*.json")
    reported = json.loads(file.read_text())
    assert [p.name for p in tmp_path.iterdir()] == ["out"], "the tier's folder is gone"
    assert file.with_suffix(".png").stat().st_size > 1000
    assert reported["machine"]["cores"] and reported["software"]["torch"] and reported["options"]["threads"] == 1
    assert [*reported["workloads"]] == [*WORKLOADS] and all(name in reply.output for name in WORKLOADS)
    for name, found in reported["workloads"].items():
        assert [*found["variants"]] == ["off", "on", "disk"][: 3 if name == "no-reuse" else 2]
        off = [run["figures"]["duration_s"] for run in found["variants"]["off"]["runs"]]
        for variant, of in found["variants"].items():
            runs = [run["figures"] for run in of["runs"]]
            assert len(runs) == 1 and all(run["preemptions"] == 0 for run in runs), "the memory holds a round"
            shares = [a / run["duration_s"] for a, run in zip(off, runs, strict=True)]
            assert of["of_off"]["median"] == pytest.approx(median(shares))
            assert of["of_off"]["overhead"] == pytest.approx(1 / median(shares) - 1)
            assert all(run["cpu_s"] > 0 for run in runs) and (of["cpu_of_off"]["median"] == 1) == (variant == "off")
            asked = runs[0]["prompt_tokens_per_s"] * runs[0]["duration_s"]
            assert variant == "on" or all(run["cached_share"] < 0.02 for run in runs)
            if name != "tree-of-thought":  # whose branches look their prompt up, too
                found_tokens = runs[0]["cached_share"] * asked
                assert runs[0]["computed_prompt_tokens"] + found_tokens == pytest.approx(asked)
    variants = {name: found["variants"] for name, found in reported["workloads"].items()}
    talks = variants["multi-turn"]["on"]["runs"]
    # Of each turn but the first: the answer's last token, whose keys and values were not needed, and the turn itself.
    once = USERS * (TURN + (TURNS - 1) * (1 + TURN))
    assert all(once - USERS * TURNS <= run["figures"]["computed_prompt_tokens"] <= once for run in talks)
    assert variants["few-shot"]["on"]["figures"]["cached_share"]["min"] > 0.5
    for variant in ("on", "disk"):
        assert variants["no-reuse"][variant]["figures"]["evicted_blocks"]["min"] > 0
    summaries = reported["workloads"]["no-reuse"]["engines"]
    assert [v for v, lines in summaries.items() if any(line.startswith("disk ") for line in lines)] == ["disk"]
    assert "cache disk" in reply.output


class Wrong(FakeEngine):
    """Its answers are off by one."""

    async def submit(self, request):
        async for delta in super().submit(request):
            yield replace(delta, token_ids=tuple((token + 1) % VOCABULARY for token in delta.token_ids))


async def test_answers_that_differ_are_no_measurement(monkeypatch):
    monkeypatch.setattr("kvasir.cli.bench.prefix.probe", lambda *_: Probe(1e9, 1e9))
    engines = {"off": FakeEngine, "on": Wrong}
    fronts = {name: Front(engine(num_blocks=200, vocab_size=VOCABULARY)) for name, engine in engines.items()}
    for front in fronts.values():
        await front.start()
    try:
        with pytest.raises(KvasirError, match=r"few-shot.*round 0.*cache on.*answer 0"):
            await measure_rounds("few-shot", Load(1, 8, 4), 1, fronts, 1)
        reported = await measure_rounds("few-shot", Load(1, 8, 4), 1, {"off": fronts["on"], "on": fronts["on"]}, 1)
        assert reported["requests"] == TURNS
    finally:
        for front in fronts.values():
            await front.stop()


def test_every_bit_of_an_answer_is_compared():
    same = Exchange((1, 2), 1, [(3,)], [(-0.5,)])
    check_equal("here", [same], [replace(same, ttft=3.0)])
    for other in (
        replace(same, answers=[(4,)]),
        replace(same, prompt=(1, 3)),
        replace(same, logprobs=[(-0.5000000001,)]),
    ):
        with pytest.raises(KvasirError, match="differs"):
            check_equal("here", [same], [other])
    with pytest.raises(ValueError):
        check_equal("here", [same], [])


def test_engines_take_the_first_place_equally_often():
    for variants in (["off", "on"], ["off", "on", "disk"]):
        orders = [rotated(variants, number) for number in range(len(variants))]
        assert [{*column} for column in zip(*orders, strict=True)] == [{*variants}] * len(variants)


def test_ratios_by_hand():
    ratio = ratio_to([2.0, 3.0, 4.0], [1.0, 3.0, 5.0])
    assert (ratio.median, ratio.min, ratio.max, ratio.overhead) == (1.0, 0.8, 2.0, 0.0)
    assert ratio_to([1.0], [1.25]).overhead == pytest.approx(0.25)


@pytest.mark.parametrize(
    "args",
    [
        ["prefix"],
        ["prefix", "kvasir-mini", "--trace", "m.jsonl"],
        ["prefix", "kvasir-mini", "--workload", "luck"],
        ["prefix", "kvasir-mini", "--no-prefix-cache"],
        ["prefix", "kvasir-mini", "--workload", "no-reuse", "--cache-dir", "/dev/null"],
        ["kvasir-mini", "another"],
    ],
)
def test_the_command_refuses(args):
    error = CliRunner().invoke(app, ["bench", *args]).exception
    assert isinstance(error, ConfigError) and error.hint


def test_a_round_that_the_context_does_not_hold_is_refused():
    args = ["bench", "prefix", "kvasir-mini", "--input-len", "300", "--workload", "agents"]
    assert isinstance(CliRunner().invoke(app, args).exception, InvalidRequest)
