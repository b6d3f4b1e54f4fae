"""What a server says about a bad request quotes little of it: never the whole of a hostile value."""

from __future__ import annotations

import pytest

from kvasir.serve.dialects.anthropic.wire import MessagesRequest
from kvasir.serve.dialects.llamacpp.wire import CompletionRequest as LlamaRequest
from kvasir.serve.dialects.ollama.wire import ChatRequest as OllamaChat
from kvasir.serve.dialects.openai.responses.wire import ResponseRequest
from kvasir.serve.dialects.openai.wire import ChatRequest, CompletionRequest, EmbeddingRequest
from tests.serve.running import client

MOST = 3000  # characters of an error's body: a message with its hint, a field's name, and the shape around
HOSTILE = "\x1b[2J\u202e\u00df'\"" * 1500  # 12,000
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
ROUTES = {
    "/v1/chat/completions": (ChatRequest, CHAT),
    "/v1/completions": (CompletionRequest, {"prompt": "ab"}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "ab"}),
    "/v1/responses": (ResponseRequest, {"model": "fake", "input": "ab", "max_output_tokens": 3}),
    "/v1/messages": (MessagesRequest, CHAT | {"max_tokens": 3}),
    "/api/chat": (OllamaChat, CHAT | {"stream": False, "options": {"num_predict": 3}}),
    "/completion": (LlamaRequest, {"prompt": "ab", "n_predict": 3}),
}
SHAPES = {
    "text": HOSTILE,
    "key": {HOSTILE: 1},
    "nested": [{"type": HOSTILE, "role": HOSTILE, "name": HOSTILE}],
    "number": 10**400,
}


def quotes_little(response) -> None:
    if response.status_code != 200:
        assert len(response.text) <= MOST, f"{len(response.text)} characters: {response.text[:300]}"
        assert "\\u001b" not in response.text and "\u202e" not in response.text, "what a terminal would obey"
    assert sum(len(name) + len(value) for name, value in response.headers.items()) <= MOST
    assert response.status_code < 500, response.text


@pytest.mark.few(3)
@pytest.mark.parametrize("route", ROUTES)
async def test_a_field_of_a_body(http, route):
    wire, good = ROUTES[route]
    for field in (*wire.model_fields, HOSTILE):
        for shape in SHAPES.values():
            if field not in ("prompt", "input", "messages") or shape is not HOSTILE:
                quotes_little(await http.post(route, json=good | {"max_tokens": 3} | {field: shape}))


@pytest.mark.parametrize(
    "name", ["host", "origin", "authorization", "content-type", "anthropic-version", "x-request-id"]
)
async def test_an_error_quotes_little_of_a_long_header(name):
    async with client() as http:
        value = ("\u00df'\"%" * 7000).encode("latin-1")
        for route in ("/v1/completions", "/v1/messages", "/api/chat"):
            quotes_little(await http.post(route, content=b"{}", headers={name: value}))


@pytest.mark.parametrize("path", ["/v1/models/{}", "/v1/responses/{}", "/v1/files/{}", "/v1/batches/{}", "/{}"])
async def test_a_path_and_a_query(http, path):
    hostile = "%1b%E2%80%AE" * 1500
    for method in ("GET", "POST", "DELETE"):
        quotes_little(await http.request(method, path.format(hostile)))
        quotes_little(await http.request(method, path.format("x") + f"?limit={hostile}&after={hostile}&{hostile}=1"))


def _tool(**fields) -> dict:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}} | fields}]}


def _said(content: object, **fields) -> dict:
    return {"messages": [{"role": "user", "content": content} | fields]}


def _format(**schema) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "strict": True, "schema": schema}}}


def _block(**fields) -> dict:
    return _said([fields])


DEEP = (
    ("/v1/chat/completions", _tool(name=HOSTILE)),
    ("/v1/chat/completions", _tool(parameters={"type": HOSTILE})),
    ("/v1/chat/completions", _tool() | {"tool_choice": {"type": "function", "function": {"name": HOSTILE}}}),
    ("/v1/chat/completions", _said("x", role=HOSTILE)),
    ("/v1/chat/completions", _said([{"type": HOSTILE}])),
    ("/v1/chat/completions", _said([{"type": "image_url", "image_url": {"url": HOSTILE}}])),
    ("/v1/chat/completions", _format(type=HOSTILE)),
    ("/v1/chat/completions", _format(**{"$ref": HOSTILE})),
    ("/v1/chat/completions", _format(**{HOSTILE: 1, "type": "string"})),
    ("/v1/chat/completions", _format(type="string", format=HOSTILE)),
    ("/v1/chat/completions", _format(type="string", pattern="(" + HOSTILE)),
    ("/v1/completions", {"guided_regex": "(" + HOSTILE}),
    ("/v1/completions", {"structured_outputs": {"regex": "(" + HOSTILE}}),
    ("/v1/completions", {"structured_outputs": {"grammar": HOSTILE}}),
    ("/v1/completions", {"structured_outputs": {"grammar": "start: " + "a" * 70_000}}),
    ("/v1/completions", {"structured_outputs": {"json": HOSTILE}}),
    ("/v1/completions", {"logit_bias": {"1": HOSTILE}}),
    ("/v1/completions", {"bad_words": [HOSTILE]}),
    ("/v1/messages", _block(type=HOSTILE)),
    ("/v1/messages", _block(type="tool_result", tool_use_id=HOSTILE)),
    ("/v1/messages", _block(type="image", source={"type": "url", "url": HOSTILE})),
    ("/v1/messages", _block(type="text", text="x", **{HOSTILE: 1})),
    ("/v1/messages", {"tools": [{"name": HOSTILE, "input_schema": {"type": "object"}}]}),
    ("/v1/messages", {"tools": [{"name": "f", "input_schema": {"type": HOSTILE}}]}),
    ("/v1/messages", {"tools": [{"name": "f", "type": HOSTILE}]}),
    ("/v1/responses", {"input": [{"type": HOSTILE}]}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": HOSTILE}]}]}),
    ("/v1/responses", {"tools": [{"type": HOSTILE}]}),
    ("/v1/responses", {"text": {"format": {"type": HOSTILE}}}),
    ("/api/chat", {"format": HOSTILE}),
    ("/api/chat", {"format": {"type": HOSTILE}}),
    ("/api/chat", {"options": {HOSTILE: 1}}),
    ("/api/chat", _said("x", images=[HOSTILE])),
    ("/completion", {"grammar": HOSTILE}),
    ("/completion", {"json_schema": {"type": HOSTILE}}),
    ("/completion", {"samplers": [HOSTILE]}),
)


async def test_a_value_deep_in_a_body(http):
    for route, fields in DEEP:
        quotes_little(await http.post(route, json=ROUTES[route][1] | {"max_tokens": 3} | fields))
