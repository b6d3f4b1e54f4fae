"""/v1/completions: the best of several answers, and what stands between a prompt and a suffix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.engine.answer import Answer, TokenInfo
from kvasir.engine.front import Front
from kvasir.serve.conversation.ranking import best
from tests.later import openai
from tests.serve.fakes import VOCAB, EchoEngine, byte_tokenizer, template
from tests.serve.running import client, live
from tests.text.test_fim import QWEN, tokenizer

URL = "/v1/completions"


def info(logprob: float) -> TokenInfo:
    return TokenInfo(0, "", b"", 0, logprob)


@given(st.lists(st.lists(st.floats(-50, 0), max_size=5), min_size=1, max_size=6), st.integers(1, 6))
def test_the_best_are_those_of_the_highest_mean(scores, n):
    answers = [Answer(i, logprobs=[info(s) for s in own]) for i, own in enumerate(scores)]
    chosen = best(answers, n)
    if len(answers) <= n:
        assert chosen == answers
        return
    assert [a.index for a in chosen] == list(range(n))
    means = [sum(i.logprob for i in a.logprobs) / len(a.logprobs) if a.logprobs else -1e9 for a in chosen]
    assert means == sorted(means, reverse=True)
    left = [a for a in answers if not any(a.logprobs is c.logprobs for c in chosen)]
    assert all(sum(i.logprob for i in a.logprobs) / len(a.logprobs) <= means[-1] + 1e-9 for a in left if a.logprobs)


async def test_only_the_best_are_returned_and_all_are_counted():
    async with client() as http:
        fields = {"prompt": ["abcdef", "xyz"], "max_tokens": 6, "temperature": 1.0, "seed": 5}
        answer = (await http.post(URL, json={**fields, "n": 2, "best_of": 4})).json()
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
        assert all(c["logprobs"] is None for c in answer["choices"])
        assert answer["usage"]["completion_tokens"] == 2 * 4 * 6
        every = (await http.post(URL, json={**fields, "n": 4})).json()  # all are equally probable: the first stay
        assert [c["text"] for c in answer["choices"]] == [every["choices"][i]["text"] for i in (0, 1, 4, 5)]
        scored = (await http.post(URL, json={**fields, "n": 1, "best_of": 2, "logprobs": 1})).json()
        assert all(c["logprobs"]["token_logprobs"] == [-0.5] * 6 for c in scored["choices"])


MARKS = tuple(f"<{i}>" for i in range(256, VOCAB))  # as many as the byte tokenizer has


def filling() -> Front:
    """A model that has tokens for filling in the middle; its answers repeat the prompt."""
    known = tokenizer(*MARKS, *QWEN)
    return Front(EchoEngine(vocab_size=VOCAB + len(QWEN)), known, template())


async def test_a_suffix_makes_a_prompt_to_be_filled_in():
    async with client(front=filling()) as http:
        fields = {"prompt": "be", "suffix": "af", "max_tokens": 7, "temperature": 0, "return_token_ids": True}
        choice = (await http.post(URL, json={**fields, "ignore_eos": True})).json()["choices"][0]
        prefix, middle, suffix = (VOCAB + i for i in range(3))
        assert choice["prompt_token_ids"] == [prefix, *b"be", suffix, *b"af", middle]
        assert choice["text"] == "beaf"
        ends = (await http.post(URL, json=fields)).json()["choices"][0]  # a mark ends what stands in the middle
        assert (ends["text"], ends["finish_reason"], ends["stop_reason"]) == ("", "stop", None)
        ids = (await http.post(URL, json={**fields, "prompt": [98, 101]})).json()["choices"][0]
        assert ids["prompt_token_ids"] == choice["prompt_token_ids"]
        plain = (await http.post(URL, json={**fields, "suffix": ""})).json()["choices"][0]
        assert plain["prompt_token_ids"] == [*b"be"]
        refused = await http.post(URL, json={**fields, "echo": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "echo")


async def test_a_model_without_infill_tokens_refuses_a_suffix():
    async with client() as http:
        response = await http.post(URL, json={"prompt": "a", "suffix": "b"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "suffix")
        assert response.json()["error"]["param"] == "suffix"


def test_the_official_client():
    with live(front=filling()) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as own:
        answer = own.completions.create(
            model="fake", prompt="a", suffix="b", n=1, best_of=2, max_tokens=4, extra_body={"ignore_eos": True}
        )
        assert len(answer.choices) == 1 and answer.usage.completion_tokens == 8
        with pytest.raises(openai.BadRequestError, match="best_of"):
            own.completions.create(model="fake", prompt="a", n=3, best_of=2)


def test_the_byte_tokenizer_has_as_many_marks():
    assert byte_tokenizer().vocab_size == VOCAB
