"""`return_progress` of llama.cpp: events that tell how much of a prompt is computed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.dialects.table import objects
from tests.serve.running import client

PROMPT = "p" * 200
STEPS: dict[str, Any] = {"max_tokens_per_step": 48}
ROUTES = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5},
    "/completion": {"prompt": PROMPT, "n_predict": 5},
}


async def events(http, path: str, **fields) -> list:
    body = {**ROUTES[path], "temperature": 0, "stream": True, "return_progress": True, **fields}
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return objects(response.text)


def text_of(event) -> str:
    if "choices" not in event:
        return event["content"]
    [choice] = event["choices"]
    return choice.get("text", "") or choice.get("delta", {}).get("content") or ""


@pytest.mark.parametrize("path", ROUTES)
async def test_the_prompt_is_followed_step_by_step(path):
    async with client(**STEPS) as http:
        found = await events(http, path)
        steps = [event["prompt_progress"] for event in found if "prompt_progress" in event]
        total = steps[0]["total"]
        assert total >= 200 and {step["total"] for step in steps} == {total} and steps[0]["cache"] == 0
        assert [step["processed"] for step in steps] == [*range(48, total, 48), total]
        times = [step["time_ms"] for step in steps]
        assert times == sorted(times) and times[0] >= 0
        assert all("prompt_progress" in event for event in found[: len(steps)]), "they come before all tokens"
        assert not any(map(text_of, found[: len(steps)]))
        plain = await events(http, path, return_progress=False)
        assert "".join(map(text_of, found)) == "".join(map(text_of, plain))
        assert not any("prompt_progress" in event for event in plain)
        again = [event["prompt_progress"] for event in await events(http, path) if "prompt_progress" in event]
        assert again[-1]["processed"] == total and again[0]["cache"] > 150
        assert all(step["processed"] >= step["cache"] for step in again)


@pytest.mark.parametrize("path", ROUTES)
async def test_several_choices_share_one_prompt(path):
    async with client(**STEPS) as http:
        many = {"/completion": "n_cmpl"}.get(path, "n")
        found = await events(http, path, temperature=1, **{many: 3})
        steps = [event["prompt_progress"]["processed"] for event in found if "prompt_progress" in event]
        assert steps == sorted(set(steps)) and steps[-1] >= 200


async def test_each_of_several_prompts_is_followed():
    async with client(**STEPS) as http:
        found = await events(http, "/v1/completions", prompt=["a" * 100, "b" * 150])
        for i, total in enumerate((100, 150)):
            mine = [e["prompt_progress"] for e in found if "prompt_progress" in e and e["choices"][0]["index"] == i]
            assert mine[-1]["processed"] == mine[-1]["total"] == total


@pytest.mark.parametrize("path", ROUTES)
async def test_it_is_for_streams_whose_events_have_no_ids(http, path):
    body = {**ROUTES[path], "return_progress": True}
    answer = await http.post(path, json=body)
    assert answer.status_code == 200 and "prompt_progress" not in answer.text
    answer = await http.post(path, json={**body, "stream": True}, headers={"x-kvasir-event-ids": "1"})
    assert answer.status_code == 400 and "return_progress" in answer.text


async def test_completions_have_timings_per_token(http):
    found = await events(http, "/v1/completions", timings_per_token=True)
    timed = [event["timings"] for event in found if "timings" in event]
    assert [one["predicted_n"] for one in timed] == sorted(one["predicted_n"] for one in timed)
    assert timed[-1]["predicted_n"] == 5 and timed[-1]["prompt_n"] + timed[-1]["cache_n"] == 200
    assert not any("timings" in event for event in await events(http, "/v1/completions"))
