"""llama.cpp's routes on the bundled model: the same answers as by the other dialects; and the best of several."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import pytest

from tests.e2e.test_serve import settled
from tests.later import openai

pytestmark = pytest.mark.slow

MODEL = "kvasir-mini"
QUESTION = [{"role": "user", "content": "How old is Anna?"}]
NEUTRAL = {"samplers": ["temperature"], "temperature": 1.0}  # what the API of OpenAI has as its defaults


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server, timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def api(server):
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as api:
        yield api


def ask(http, **fields) -> dict:
    response = http.post("/completion", json={"n_predict": 40, "seed": 3, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def streamed(http, **fields) -> tuple[str, dict]:
    text = http.post("/completion", json={"n_predict": 40, "seed": 3, "stream": True, **fields}).text
    *pieces, last = (json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if part)
    assert [t for p in pieces for t in p["tokens"]] and last["stop"]
    return "".join(piece["content"] for piece in pieces), last


@pytest.mark.parametrize("fields", [{"temperature": 0}, NEUTRAL], ids=["greedy", "sampled"])
def test_a_completion_is_that_of_the_openai_dialect(http, api, fields):
    prompt = "Once upon a time"
    theirs = api.completions.create(
        model=MODEL, prompt=prompt, max_tokens=40, seed=3, temperature=fields["temperature"],
        extra_body={"min_p": 0.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "return_token_ids": True},
    ).choices[0]  # fmt: skip
    own = ask(http, prompt=prompt, return_tokens=True, **fields)
    assert (own["content"], own["tokens"]) == (theirs.text, theirs.token_ids)
    assert own["stop_type"] == {"length": "limit", "stop": "eos"}[theirs.finish_reason]
    text, last = streamed(http, prompt=prompt, **fields)
    assert text == own["content"]
    assert {k: last[k] for k in ("stop_type", "tokens_predicted")} == {
        k: own[k] for k in ("stop_type", "tokens_predicted")
    }


def test_turns_rendered_by_the_client_equal_a_chat(http, api):
    messages = list(QUESTION)
    for follow_up in ("And Peter?", "Thank you."):
        chat = api.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=40)
        prompt = http.post("/apply-template", json={"messages": messages}).json()["prompt"]
        ids = http.post("/tokenize", json={"content": prompt}).json()["tokens"]
        own = ask(http, prompt=ids, temperature=0)
        assert own["tokens_evaluated"] == chat.usage.prompt_tokens
        assert own["content"] == chat.choices[0].message.content
        messages += [{"role": "assistant", "content": own["content"]}, {"role": "user", "content": follow_up}]


def test_a_token_that_may_not_come_never_comes(http):
    free = ask(http, prompt="The cat", temperature=0, return_tokens=True)["tokens"]
    first = free[0]
    for fields in ({"temperature": 0}, NEUTRAL | {"temperature": 3.0}):
        held = ask(http, prompt="The cat", logit_bias=[[first, False]], return_tokens=True, **fields)
        assert first not in held["tokens"] and held["generation_settings"]["seed"] == 3


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"grammar": 'root ::= "yes" | "no" " "? [0-9]+\n'}, r"yes|no ?[0-9]+"),
        ({"json_schema": {"type": "integer", "minimum": 10, "maximum": 99}}, r"\d\d"),
    ],
    ids=["grammar", "json_schema"],
)
def test_an_answer_follows_its_grammar(http, fields, pattern):
    for temperature in (0.0, 1.5):
        answer = ask(http, prompt="Answer: ", temperature=temperature, **fields)
        assert answer["stop_type"] == "limit" or re.fullmatch(pattern, answer["content"])


def test_probabilities_are_those_of_the_openai_dialect(http, api):
    theirs = api.completions.create(model=MODEL, prompt="The cat", max_tokens=5, temperature=0, logprobs=3).choices[0]
    own = ask(http, prompt="The cat", n_predict=5, temperature=0, n_probs=3)["completion_probabilities"]
    assert [p["logprob"] for p in own] == theirs.logprobs.token_logprobs
    assert [len(p["top_logprobs"]) for p in own] == [3] * 5


def test_best_of_returns_the_choice_of_highest_probability(api):
    fields = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 20, "seed": 11, "temperature": 1.0}
    every = api.completions.create(**fields, n=5, logprobs=0)
    means = [sum(c.logprobs.token_logprobs) / len(c.logprobs.token_logprobs) for c in every.choices]
    order = sorted(range(5), key=lambda i: (-means[i], i))
    best = api.completions.create(**fields, n=2, best_of=5)
    assert [c.text for c in best.choices] == [every.choices[i].text for i in order[:2]]
    assert best.usage.completion_tokens == every.usage.completion_tokens
    assert len(set(means)) > 1


async def test_disconnected_clients_affect_no_others(server, http):
    expected = ask(http, prompt="Once upon a time", temperature=0)["content"]

    async def leave(c: httpx.AsyncClient, lines: int) -> None:
        fields = {"prompt": "Tell me", "n_predict": 200, "seed": lines, "stream": True, **NEUTRAL}
        async with c.stream("POST", "/completion", json=fields) as response:
            async for _ in response.aiter_lines():
                lines -= 1
                if lines <= 0:
                    return

    async def stay(c: httpx.AsyncClient) -> str:
        fields = {"prompt": "Once upon a time", "n_predict": 40, "temperature": 0}
        return (await c.post("/completion", json=fields)).json()["content"]

    async with httpx.AsyncClient(base_url=server, timeout=60) as c:
        results = await asyncio.gather(*(leave(c, n) for n in range(1, 9)), stay(c), stay(c))
    assert [r for r in results if r] == [expected, expected]
    await settled(server)
