"""The product of answers, tokens and log-probabilities is bounded by memory, for one request and for all together."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from typing import Any

import msgspec
import pytest

from kvasir.engine.answer import Candidate, TokenInfo
from kvasir.serve.conversation.logprobs import chat_logprobs
from kvasir.serve.conversation.output_memory import CANDIDATE, LOGPROB, TOKEN, needed
from kvasir.serve.dialects.openai.shapes import completion_logprobs
from kvasir.serve.settings import ServeSettings
from kvasir.types import Request, SamplingParams
from tests.serve.fakes import byte_tokenizer
from tests.serve.running import client

MANY = {"prompt": "ab", "n": 16, "max_tokens": 10, "logprobs": 20, "temperature": 0, "ignore_eos": True}
CHAT = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 10,
    "n": 16,
    "logprobs": True,
    "top_logprobs": 20,
}
SMALL = ServeSettings(answer_memory=1 << 20)
BIG: dict[str, Any] = {"max_model_len": 4096, "num_blocks": 4096}


def request_of(prompt: int, **params) -> Request:
    return Request("a", tuple(range(prompt)), SamplingParams(**params))


def test_output_memory_is_the_product_of_choices_tokens_and_entries():
    assert needed(request_of(3, max_tokens=10), True) == 10 * TOKEN
    assert needed(request_of(3, max_tokens=10, n=4), True) == 40 * TOKEN
    assert needed(request_of(3, max_tokens=10, n=4, logprobs=5), True) == 40 * (TOKEN + LOGPROB + 5 * CANDIDATE)
    assert needed(request_of(3, max_tokens=10, n=4, logprobs=5), False) == 0
    assert needed(request_of(30, max_tokens=10, prompt_logprobs=0), False) == 30 * LOGPROB


@pytest.mark.parametrize("shape", [chat_logprobs, completion_logprobs])
@pytest.mark.parametrize("count", [0, 20])
def test_no_token_takes_more_than_is_reserved(shape, count):
    """The objects of an answer, the shape that is encoded, and its JSON, all at once."""
    tokenizer, tokens = byte_tokenizer(), 300

    def info(place: int) -> TokenInfo:
        def spelled(i: int) -> tuple[int, str, bytes, float]:
            token = (7 * place + i) % 256
            return 1000 + token, tokenizer.token_text(token), tokenizer.token_bytes(token), -1.5 - place - i

        top = tuple(Candidate(*spelled(i)) for i in range(count))
        token, text, data, logprob = spelled(0)
        return TokenInfo(token, text, data, place, logprob, 1, top)

    [info(place) for place in range(tokens)]  # the tokenizer knows all of them then
    gc.collect()
    tracemalloc.start()
    try:
        infos = [info(place) for place in range(tokens)]
        shown = shape(infos)
        data = msgspec.json.encode(shown)
        used = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert data and infos
    assert used / tokens <= TOKEN + LOGPROB + count * CANDIDATE, f"{used / tokens:.0f} bytes a token"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", MANY, "logprobs"),
        ("/v1/completions", MANY | {"n": 1, "best_of": 16}, "logprobs"),
        ("/v1/completions", MANY | {"n": 1, "max_tokens": 1, "prompt": ["ab"] * 200}, "logprobs"),
        ("/v1/completions", {"prompt": "ab" * 1000, "max_tokens": 1, "prompt_logprobs": 20}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "ab", "n": 128, "max_tokens": 100}, "n"),
        ("/v1/chat/completions", CHAT, "logprobs"),
        ("/v1/chat/completions", {**CHAT, "n": 1, "max_tokens": None}, "logprobs"),
        ("/completion", {"prompt": "ab", "n_predict": 4000, "n_probs": 20}, "logprobs"),
        ("/v1/responses", {"model": "fake", "input": "ab", "include": ["message.output_text.logprobs"],
                           "top_logprobs": 20, "stream": True}, "logprobs"),
    ],
)  # fmt: skip
async def test_a_request_that_can_never_fit_is_refused_by_field(path, body, param):
    async with client(SMALL, **BIG) as http:
        response = await http.post(path, json=body)
        assert response.status_code == 400, response.text[:200]
        error = response.json()["error"]
        assert "of memory; the server has 1 MiB" in error["message"] and "stream" in error["message"]
        assert param in (error["param"], "logprobs") and error["param"]


async def test_a_stream_holds_nothing_and_may_be_as_long_as_the_context():
    async with client(SMALL, **BIG) as http:
        body = {"prompt": "ab", "max_tokens": 300, "logprobs": 20, "ignore_eos": True, "temperature": 0}
        assert (await http.post("/v1/completions", json=body)).status_code == 400
        assert (await http.post("/v1/completions", json=body | {"stream": True})).status_code == 200


async def test_the_total_is_bounded_and_reservations_are_released():
    async with client(SMALL, step_seconds=0.01, **BIG) as http:
        body = {"prompt": "ab", "max_tokens": 60, "logprobs": 20, "ignore_eos": True, "temperature": 0}
        memory = http.app.state.answer_memory  # type: ignore[attr-defined]
        first = asyncio.ensure_future(http.post("/v1/completions", json=body))
        while not memory.held:
            await asyncio.sleep(0.005)
        refused = await http.post("/v1/completions", json=body)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert "stream it" in refused.json()["error"]["message"]
        assert (await http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 5})).status_code == 200
        assert (await first).status_code == 200 and memory.held == 0
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert (await http.post("/v1/completions", json=body | {"top_p": 7})).status_code == 400 and memory.held == 0


async def test_a_background_response_holds_its_memory_until_it_ends():
    async with client(SMALL, step_seconds=0.01, **BIG) as http:
        memory = http.app.state.answer_memory  # type: ignore[attr-defined]
        body = {"model": "fake", "input": "ab", "max_output_tokens": 40, "background": True}
        made = (await http.post("/v1/responses", json=body)).json()
        assert memory.held == 40 * TOKEN
        while (await http.get(f"/v1/responses/{made['id']}")).json()["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
        while memory.held:
            await asyncio.sleep(0.01)
