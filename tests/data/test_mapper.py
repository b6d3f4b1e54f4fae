"""kvasir.data without Ray: rows through an engine, with a checkpoint."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest

import kvasir.data
from kvasir import LLM, SamplingParams
from kvasir.data.mapper import Mapper
from kvasir.engine.subprocess import ProcessEngine
from kvasir.errors import ConfigError, InvalidRequest
from kvasir.fleet.engine import FleetEngine

MODEL = "kvasir-mini"
SMALL = {"threads": 1, "num_blocks": 60, "max_model_len": 256, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPTS = [f"There once was a {what}" for what in ("fox", "dragon", "king", "tree", "fox")]


@pytest.fixture(scope="module")
def mapper(tmp_path_factory):
    with Mapper(MODEL, sampling_params=GREEDY, params_column="params", **SMALL) as mapper:
        yield mapper


@pytest.fixture(scope="module")
def llm():
    with LLM(MODEL, progress=False, **SMALL) as llm:
        yield llm


def rows(*prompts, **params) -> list[dict]:
    return [{"prompt": prompt, "params": params or None, "i": i} for i, prompt in enumerate(prompts)]


def test_answers_are_those_of_generate_in_order(mapper, llm):
    found = list(mapper.answers(rows(*PROMPTS)))
    expected = llm.generate(PROMPTS, GREEDY)
    assert [row["i"] for row in found] == [*range(5)]
    assert [row["generated_tokens"] for row in found] == [output.outputs[0].token_ids for output in expected]
    assert [row["generated_text"] for row in found] == [output.outputs[0].text for output in expected]
    assert [row["num_input_tokens"] for row in found] == [len(output.prompt_token_ids) for output in expected]
    assert {row["finish_reason"] for row in found} == {"length"} and not any(row["error"] for row in found)


def test_messages_and_ids_are_prompts_too(mapper, llm):
    talk = [{"role": "user", "content": "What is 2 + 3?"}]
    chat, ids, packed = mapper.answers(rows(talk, [5, 6, 7], np.array([5, 6, 7])))
    assert chat["generated_text"] == llm.chat(talk, GREEDY)[0].outputs[0].text
    expected = llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
    assert ids["generated_tokens"] == packed["generated_tokens"] == expected


def test_a_drawn_answer_depends_on_the_row_alone(mapper):
    drawn = {"temperature": 1.0, "max_tokens": 12}
    together = [row["generated_tokens"] for row in mapper.answers(rows(*PROMPTS, **drawn))]
    alone = [row["generated_tokens"] for one in PROMPTS for row in mapper.answers(rows(one, **drawn))]
    assert together == alone and together[0] == together[4] and together[0] != together[1]


BAD = [
    (None, None, "prompt"),
    (7, None, "prompt"),
    ([], None, "prompt"),
    ([10**9], None, "token id"),
    ([1] * 500, None, "context"),
    ([{"role": 3}], None, ""),
    ("ok", {"temperature": -1}, "temperature"),
    ("ok", {"temperature": "hot"}, ""),
    ("ok", {"nonsense": 1}, "nonsense"),
    ("ok", "text", "object"),
    ("ok", {"n": 2}, "n is 2"),
    ("ok", {"structured_outputs": {"regex": "("}}, ""),
    ("ok", {"structured_outputs": {"wrong": 1}}, ""),
]


def test_bad_rows_are_error_rows_and_harm_no_others(mapper):
    nested: list = []
    for _ in range(1000):
        nested = [nested]
    asked = [{"prompt": prompt, "params": params} for prompt, params, _ in [*BAD, (nested, None, "deep")]]
    found = list(mapper.answers([*asked, {"other": 1}, {"prompt": "Hello", "params": None}]))
    for row, (prompt, params, message) in zip(found, BAD, strict=False):
        assert row["error"] and message in row["error"], (prompt, params, row)
        assert not row["generated_text"]
    assert "nested" in found[-3]["error"] and "column" in found[-2]["error"]
    assert found[-1]["generated_text"] and not found[-1]["error"]
    assert not any("internal" in row["error"] for row in found), [row["error"] for row in found]


def test_a_full_queue_of_texts_only_delays_rows(mapper, monkeypatch):
    monkeypatch.setattr("kvasir.engine.turns.MAX_WAITING_PER_KEY", 2)
    monkeypatch.setattr("kvasir.data.mapper.PAUSE", 0.001)
    found = list(mapper.answers(rows(*(f"Once there was a {i}" for i in range(60)), max_tokens=2)))
    assert not any(row["error"] for row in found) and {row["num_generated_tokens"] for row in found} == {2}


def test_batches_of_columns(mapper):
    batch = {"prompt": np.array(PROMPTS), "params": np.array([None] * 5), "i": np.arange(5)}
    found = asyncio.run(mapper(batch))
    assert found["generated_text"] == [row["generated_text"] for row in mapper.answers(rows(*PROMPTS))]
    assert found["i"] is batch["i"]
    with pytest.raises(InvalidRequest, match="no column 'prompt'"):
        asyncio.run(mapper({"text": [1]}))


def count_requests(mapper: Mapper) -> int:
    return sum(mapper._front.meter.finished.values())


@pytest.mark.slow
def test_a_second_run_computes_nothing_again(tmp_path):
    job = {"model": MODEL, "sampling_params": GREEDY, "checkpoint": tmp_path / "kept", **SMALL}
    with Mapper(**job) as mapper:
        first = list(mapper.answers(rows(*PROMPTS)))
        assert count_requests(mapper) == 4, "equal rows are computed once"
    with Mapper(**job) as mapper:
        more = list(mapper.answers(rows(*PROMPTS, "Hello")))
        assert (more[:5], count_requests(mapper)) == (first, 1)
    with Mapper(**{**job, "sampling_params": SamplingParams(temperature=0, max_tokens=9)}) as mapper:
        assert [len(row["generated_tokens"]) for row in mapper.answers(rows(*PROMPTS))] == [9] * 5
        assert count_requests(mapper) == 4, "other parameters are another job"
    with Mapper(**{**job, "quantize": "q8"}) as mapper:
        list(mapper.answers(rows(*PROMPTS)))
        assert count_requests(mapper) == 4, "so are other weights"


@pytest.mark.slow
def test_several_choices_are_lists():
    params = SamplingParams(temperature=1.0, max_tokens=12, n=3)
    with Mapper(MODEL, sampling_params=params, **SMALL) as mapper:
        one, bad = mapper.answers([{"prompt": "There once was"}, {"prompt": None}])
    assert len({tuple(tokens) for tokens in one["generated_tokens"]}) > 1 and len(one["generated_text"]) == 3
    assert one["finish_reason"] == ["length"] * 3 and one["num_generated_tokens"] == 36
    assert bad["error"] and bad["generated_text"] == bad["generated_tokens"] == bad["finish_reason"] == []


@pytest.mark.slow
def test_the_death_of_the_engine_costs_no_row(tmp_path):
    plain = list(kvasir.data.map(rows(*PROMPTS), model=MODEL, sampling_params=GREEDY, **SMALL))
    with Mapper(MODEL, sampling_params=GREEDY, **SMALL) as mapper:
        answers = mapper.answers(rows(*PROMPTS))
        first = next(answers)
        os.kill(mapper._front.engine.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        assert [first, *answers] == plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"num_gpus": 1}, "Ray datasets"),
        ({"wrong": 1}, "wrong"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        list(kvasir.data.map(rows("x"), model=MODEL, **options))


@pytest.mark.slow
def test_several_engines_answer_alike_and_one_may_die(mapper):
    asked = rows(*(f"There once was a number {i}" for i in range(60)))
    with Mapper(MODEL, sampling_params=GREEDY, params_column="params", replicas=2, **SMALL) as several:
        answers = several.answers(asked)
        first = next(answers)
        replicas = several._front.engine.replicas  # type: ignore[attr-defined]
        assert len(replicas) == 2
        os.kill(replicas[1].engine.pid, signal.SIGKILL)
        assert [first, *answers] == list(mapper.answers(asked))


FAKE = {"deadly_token": 255, "step_seconds": 0.001}


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_prompt_that_kills_engines_is_an_error_row_and_the_job_goes_on(tmp_path, monkeypatch, replicas):
    """The engines are processes that die whenever they compute the token 255."""
    engines: list[ProcessEngine] = []

    def process(index: int) -> ProcessEngine:
        engines.append(ProcessEngine(fake=FAKE, hands_over=replicas > 1))
        return engines[-1]

    def engine_of(options, count):
        return process(0) if count == 1 else FleetEngine(process, count, max_waiting=64)

    monkeypatch.setattr("kvasir.data.mapper.engine_of", engine_of)
    good = rows(*([i, i + 1] for i in range(20)))
    poison = {"prompt": [255, 3], "params": None, "i": 99}
    job = {"model": MODEL, "sampling_params": GREEDY, "replicas": replicas}
    with Mapper(**job) as mapper:
        plain = list(mapper.answers(good))
    with Mapper(**job, checkpoint=tmp_path) as mapper:
        found = list(mapper.answers([*good[:9], poison, *good[9:]]))
    failed = found.pop(9)
    assert found == plain and not any(row["error"] for row in plain)
    assert failed["i"] == 99 and "twice" in failed["error"] and failed["generated_tokens"] == []
    assert sum(engine.restarts for engine in engines) >= 2
    with Mapper(**job, checkpoint=tmp_path) as mapper:
        assert list(mapper.answers(good)) == plain and count_requests(mapper) == 0, "the others were kept"
