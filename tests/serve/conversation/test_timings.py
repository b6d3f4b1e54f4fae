"""Reported times of a choice are the engine's, however late its tokens are read."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from kvasir.engine.answer import TextDelta
from kvasir.serve.dialects.llamacpp.lines import Lines
from kvasir.serve.dialects.llamacpp.shapes import ChoiceState
from kvasir.serve.dialects.ollama.answer import Clock
from kvasir.types import Request, SamplingParams, Usage
from tests.serve.fakes import EchoEngine
from tests.serve.running import client, events, make_front


def test_llamacpp_times_an_answer_by_the_engine():
    reported = ChoiceState(0, Request("r", (1,), SamplingParams(max_tokens=4, seed=0)), Lines(0, None))
    reported.pace.begun -= 10
    for i, at in enumerate((1, 2, 4)):
        reported.add(TextDelta(0, "a", token_ids=(97,), usage=Usage(1, i + 1), at=reported.pace.begun + at), False)
    assert reported.timings["prompt_ms"] == pytest.approx(1000)
    assert reported.timings["predicted_ms"] == pytest.approx(3000)
    assert reported.timings["predicted_per_second"] == pytest.approx(1)


def test_ollama_times_an_answer_by_the_engine():
    clock = Clock()
    clock.asked()
    begun = time.monotonic()
    time.sleep(0.05)
    for at in (0.01, 0.02, 0.04):
        clock.token(begun + at)
    assert clock.durations(1, 3)["eval_duration"] == pytest.approx(0.03e9, abs=10)


def test_times_of_another_machines_clock_are_left_out():
    clock = Clock()
    clock.asked()
    for at in (0.0, 1e12):
        clock.token(at)
    durations = clock.durations(1, 2)
    spent = durations["load_duration"] + durations["prompt_eval_duration"] + durations["eval_duration"]
    assert 0 <= spent <= durations["total_duration"]


async def test_each_step_has_its_moment():
    front = make_front(EchoEngine(step_seconds=0.01))
    await front.start()
    try:
        begun = time.monotonic()
        request = front.resolve(await front.encode("abc"), SamplingParams(max_tokens=5, seed=1, ignore_eos=True))
        moments = [delta.at async for delta in front.stream(request)]
    finally:
        await front.stop()
    assert len(moments) == 5 and begun < moments[0] and moments[-1] < time.monotonic()
    assert all(later - earlier >= 0.009 for earlier, later in pairwise(moments))


@pytest.mark.parametrize("n", [1, 2])
async def test_each_chunk_of_a_chat_has_the_engines_times(n):
    """Under llama.cpp's names, and only where they are asked for."""
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 5, "n": n, "temperature": 0, "stream": True}
    async with client(step_seconds=0.01) as http:
        plain = events((await http.post("/v1/chat/completions", json=body)).text)
        reported = events((await http.post("/v1/chat/completions", json={**body, "timings_per_token": True})).text)
    assert not any("timings" in chunk for chunk in plain)
    for index in range(n):
        own = [chunk["timings"] for chunk in reported if chunk["choices"][0]["index"] == index]
        assert {timings["predicted_n"] for timings in own} == {1, 2, 3, 4, 5}
        assert len({timings["prompt_ms"] for timings in own}) == 1 and own[0]["prompt_ms"] >= 9
        for timings in own:
            assert timings["predicted_ms"] >= 9 * (timings["predicted_n"] - 1)


@pytest.mark.parametrize("path, prompt", [("chat/completions", "messages"), ("completions", "prompt")])
async def test_an_answer_without_chunks_takes_the_field_and_has_no_times_per_token(path, prompt):
    """As llama.cpp does: clients set the field once, whether they stream or not."""
    body = {prompt: [{"role": "user", "content": "abc"}] if prompt == "messages" else "abc", "timings_per_token": True}
    async with client() as http:
        answer = await http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200 and "timings" not in answer.json()
