"""A prompt that does not fit is refused in the words by which each dialect's clients know it."""

from __future__ import annotations

import re

import pytest

from kvasir.engine import wire
from kvasir.engine.front import Front
from kvasir.errors import InvalidRequest, PromptTooLong
from kvasir.runner.fake import FakeRunner
from kvasir.sched.scheduler import Scheduler
from kvasir.text.template_process import TemplateLimits
from kvasir.text.tokenizer import Tokenizer
from kvasir.types import Request, SamplingParams
from tests.serve.fakes import EchoEngine, byte_tokenizer, template
from tests.serve.running import client

CONTEXT = 64
COUNTED = "x" * 100
HUGE = "x" * 100_000  # refused before it is tokenized


def chat(text: str, **more) -> dict:
    return {"messages": [{"role": "user", "content": text}], **more}


OPENAI = {
    "/v1/chat/completions": chat,
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/responses": lambda text: {"input": text, "store": False},
    "/v1/embeddings": lambda text: {"input": text},
}
LLAMACPP = {
    "/completion": lambda text: {"prompt": text},
    "/embedding": lambda text: {"content": text},
}
OLLAMA = {
    "/api/chat": lambda text: chat(text, model="fake", truncate=False),
    "/api/generate": lambda text: {"model": "fake", "prompt": text, "truncate": False},
    "/api/embed": lambda text: {"model": "fake", "input": text, "truncate": False},
    "/api/embeddings": lambda text: {"model": "fake", "prompt": text},
}


@pytest.fixture
async def http():
    front = Front(EchoEngine(max_model_len=CONTEXT), byte_tokenizer(), template())
    async with client(front=front) as http:
        yield http


async def refused(http, path: str, body: dict) -> dict:
    answer = await http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("text", [COUNTED, HUGE], ids=["counted", "huge"])
@pytest.mark.parametrize("path", OPENAI)
async def test_a_prompt_too_long_for_openai_has_its_code(http, path, text):
    """LiteLLM reads the message, langchain the code."""
    error = await refused(http, path, OPENAI[path](text))
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert error["message"].startswith(f"This model's maximum context length is {CONTEXT} tokens")
    assert error["message"].endswith("[context_length_exceeded]"), "some clients look for the code in the text"
    assert error["param"] in ("messages", "prompt", "input")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_and_its_answer_may_be_too_long_together(http, stream):
    """A shorter prompt helps, but where the answer alone is too long."""
    error = await refused(http, "/v1/chat/completions", chat("x" * 20, max_tokens=CONTEXT - 1, stream=stream))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    error = await refused(http, "/v1/chat/completions", chat("x", max_tokens=CONTEXT, stream=stream))
    assert (error["code"], error["param"]) == ("invalid_value", "max_tokens")


@pytest.mark.parametrize("text", [COUNTED, HUGE], ids=["counted", "huge"])
async def test_a_prompt_too_long_for_anthropic_has_its_text_and_numbers(http, text):
    """Claude Code reads both numbers to see how much has to go."""
    error = await refused(http, "/v1/messages", chat(text, max_tokens=5))
    assert error["type"] == "invalid_request_error"
    numbers = re.match(r"prompt is too long[^0-9]*(\d+) tokens? > (\d+)", error["message"])
    assert numbers and int(numbers[1]) > int(numbers[2]) == CONTEXT - 1


@pytest.mark.parametrize("path", LLAMACPP)
async def test_a_prompt_too_long_for_llamacpp_has_its_type_and_two_numbers(http, path):
    error = await refused(http, path, LLAMACPP[path](COUNTED))
    assert (error["type"], error["code"]) == ("exceed_context_size_error", 400), error
    assert error["n_ctx"] == CONTEXT and error["n_prompt_tokens"] >= len(COUNTED)
    assert "context size" in error["message"]


@pytest.mark.parametrize("path", OLLAMA)
async def test_a_prompt_too_long_for_ollama_has_the_wording_of_ollama(http, path):
    error = await refused(http, path, OLLAMA[path](COUNTED))
    assert error.startswith("the input length exceeds the context length"), error


CHATS = {
    "/v1/chat/completions": chat,
    "/v1/responses": OPENAI["/v1/responses"],
    "/v1/messages": lambda text: chat(text, max_tokens=5),
    "/api/chat": OLLAMA["/api/chat"],
}
RENDERED = TemplateLimits().max_output + 1


def says_too_long(path: str, error: dict | str) -> bool:
    if path.startswith("/api/"):
        return str(error).startswith("the input length exceeds the context length")
    if path == "/v1/messages":
        return error["message"].startswith("prompt is too long: at least ")
    return error["code"] == "context_length_exceeded" and error["param"] in ("messages", "input")


@pytest.mark.parametrize("path", CHATS)
async def test_a_conversation_beyond_the_template_limit_is_too_long(http, path):
    """The process of templates gives up before anything is tokenized."""
    error = await refused(http, path, CHATS[path]("x" * RENDERED))
    assert says_too_long(path, error), error
    answer = await http.post("/v1/chat/completions", json=chat("x", max_tokens=1))
    assert answer.status_code == 200


@pytest.mark.parametrize("path", CHATS)
async def test_the_template_limit_is_named_where_the_context_is_larger(path):
    front = Front(EchoEngine(max_model_len=RENDERED * 2), byte_tokenizer(), template())
    async with client(front=front) as http:
        error = await refused(http, path, CHATS[path]("x" * RENDERED))
    assert not says_too_long(path, error) and f"more than {RENDERED - 1} characters" in str(error), error
    assert "conversation" in str(error)


@pytest.mark.parametrize("context", [CONTEXT, RENDERED * 2])
async def test_a_conversation_beyond_the_template_limit_is_truncated_on_request(context):
    front = Front(EchoEngine(max_model_len=context), byte_tokenizer(), template())
    turns = [{"role": "user", "content": "x" * RENDERED}, {"role": "assistant", "content": "y"}]
    turns.append({"role": "user", "content": "z"})
    async with client(front=front) as http:
        body = {"model": "fake", "messages": turns, "stream": False, "truncate": True}
        body["options"] = {"num_predict": 2}
        answer = await http.post("/api/chat", json=body)
        assert answer.status_code == 200, answer.text
        body = {"input": turns, "truncation": "auto", "store": False, "max_output_tokens": 2}
        answer = await http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("more", [{"raw": True}, {}, {"template": "{{ messages[0].content }}"}])
async def test_ollama_truncates_no_text_of_any_length(http, monkeypatch, more):
    body = {"model": "fake", "truncate": True, "stream": False, "options": {"num_predict": 2}} | more
    answer = await http.post("/api/generate", json=body | {"prompt": COUNTED * 100})
    assert answer.status_code == 200 and answer.json()["truncated"]["tokens"] > 9000
    monkeypatch.setattr(Tokenizer, "encode_many", None)
    error = await refused(http, "/api/generate", body | {"prompt": "x" * (1 + (1 << 20))})
    assert str(1 << 20) in error


def test_a_prompt_too_long_for_the_engine_keeps_its_numbers_across_processes():
    """A request that came past the front half, and its error past a process."""
    scheduler = Scheduler(FakeRunner(max_model_len=CONTEXT).capacity)
    with pytest.raises(PromptTooLong) as caught:
        scheduler.add(Request("r", (1,) * CONTEXT, SamplingParams(max_tokens=1)))
    error = wire.to_error(wire.decode_event(wire.encode(wire.to_fault("r", caught.value))))
    assert isinstance(error, PromptTooLong) and isinstance(error, InvalidRequest)
    assert (error.tokens, error.context, error.param) == (CONTEXT, CONTEXT, "prompt")
    assert str(error) == str(caught.value)
