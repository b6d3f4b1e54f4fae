"""Each field that the vendors' clients know is honoured or refused by name, and each field that they read is there."""

from __future__ import annotations

from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any

import pytest

from tests.later import anthropic
from tests.serve.dialects.vendors import Asked, Path, filled, simplest
from tests.serve.running import client

OBJECT = {"type": "object"}
GIVEN = {
    **{
        "model": "fake",
        "seed": 1,
        "max_tokens": 2,
        "max_output_tokens": 2,
        "call_id": "x",
        "arguments": "{}",
        "path": "x",
    },
    **dict.fromkeys(("schema", "input_schema", "parameters"), OBJECT),
    "BetaSystemMessageParam.content": "x",
    "ChatCompletionAllowedToolsParam.tools": [{"type": "function", "function": {"name": "x"}}],
    "ToolChoiceAllowedParam.tools": [{"type": "function", "name": "x"}],
}
OLLAMA = {
    **{"model": "fake", "role": "user", "type": "function", "options": {}, "keep_alive": "5m", "format": "json"},
    **{"messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x"},
    **{"name": "x", "Parameters.type": "object", "Tool.function": {"name": "x"}, "think": False},
}
TGI = {"value": "true"}  # a JSON schema, and a regular expression
BODIES = {
    "/v1/chat/completions": "openai.types.chat.completion_create_params:CompletionCreateParamsStreaming",
    "/v1/completions": "openai.types.completion_create_params:CompletionCreateParamsStreaming",
    "/v1/embeddings": "openai.types.embedding_create_params:EmbeddingCreateParams",
    "/v1/responses": "openai.types.responses.response_create_params:ResponseCreateParamsStreaming",
    "/v1/messages": "anthropic.types.message_create_params:MessageCreateParamsStreaming",
    "/v1/messages?beta=true": "anthropic.types.beta.message_create_params:MessageCreateParamsStreaming",
    "/v1/messages/count_tokens": "anthropic.types.message_count_tokens_params:MessageCountTokensParams",
    "/v1/messages/count_tokens?beta=true": "anthropic.types.beta.message_count_tokens_params:MessageCountTokensParams",
    "/v1/messages/batches": "anthropic.types.messages.batch_create_params:BatchCreateParams",
    "/v1/batches": "openai.types.batch_create_params:BatchCreateParams",
    "/api/generate": "ollama._types:GenerateRequest",
    "/api/chat": "ollama._types:ChatRequest",
    "/api/embed": "ollama._types:EmbedRequest",
    "/api/embeddings": "ollama._types:EmbeddingsRequest",
    "/api/show": "ollama._types:ShowRequest",
    "/": "huggingface_hub:TextGenerationInput",
}
SEPARATE = "anthropic.types.message_create_params:MessageCreateParamsNonStreaming"  # a line of batches is this body
QUERIES: dict[str, tuple[str, dict[str, str]]] = {
    "/v1/files": ("openai.types.file_list_params:FileListParams", {}),
    "/v1/batches": ("openai.types.batch_list_params:BatchListParams", {}),
    "/v1/models": ("anthropic.types.model_list_params:ModelListParams", {"anthropic-version": "2023-06-01"}),
    "/v1/messages/batches": ("anthropic.types.messages.batch_list_params:BatchListParams", {}),
}
# Of the fields of the beta's messages, which are tested too.
SUBSETS = ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/count_tokens?beta=true")
HEADERS = ("betas", "user_profile_id", "workspace_id")  # the client sends them as headers
KEPT_ONES = ("previous_response_id", "conversation")  # name what is not there

USER = {"role": "user", "content": "x"}


def conversations(path: Path, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The body alone, or within a conversation or with other fields if it is valid only with them."""
    yield body
    match path:
        case ("messages", 0, *_):
            first = body["messages"][0]
            call = {"type": "tool_use", "id": "x", "name": "x", "input": {}}
            yield {**body, "messages": [USER, {"role": "assistant", "content": [call]}, first, USER]}
            yield {**body, "messages": [USER, {**first, "role": "assistant"}, USER]}
        case ("input", 0, *_):
            call = {"type": "function_call", "call_id": "x", "name": "x", "arguments": "{}"}
            yield {**body, "input": [call, *body["input"]]}
        case ("suffix",):
            yield {name: value for name, value in body.items() if name != "think"}
        case ("tool_choice", *_):
            for tool in (
                {"type": "function", "function": {"name": "x"}},
                {"type": "function", "name": "x"},
                {"name": "x", "input_schema": OBJECT},
            ):
                yield {**body, "tools": [tool]}
        case ("top_logprobs",):
            yield {**body, "logprobs": True}
    if "input" not in body:
        yield {**body, "input": "x"}


def reply(answer: Any) -> str:
    error = answer.json()["error"]
    return error if isinstance(error, str) else f"{error.get('param')}: {error['message']}"


def refused_by_name(asked: Asked, status: int, text: str) -> bool:
    """Whether the error says of the field, of what it is in, or of its type that it is not supported."""
    if status not in (400, 422) or "unrecognized" in text or "missing field" in text:
        return False
    names = [part for part in asked.path if isinstance(part, str)]
    kind = simplest(asked.kind, GIVEN).get("type") if asked.kind else None
    inside = [name for name in names[:-1] if name not in ("messages", "input", "tools", "content")]
    return (
        any(f"{name} is not supported" in text for name in inside)
        or names[-1] in text
        or (kind is not None and f"'{kind}'" in text)
    )


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "url", [pytest.param(url, marks=pytest.mark.slow) if url in SUBSETS else url for url in BODIES]
)
async def test_each_field_of_a_body_is_honoured_or_refused_by_name(url):
    given = TGI if url == "/" else OLLAMA if url.startswith("/api/") else GIVEN
    closed: set[type] = {resolve_name(SEPARATE)}
    wrong: list[str] = []
    count = 0
    async with client(max_model_len=320) as http:
        for asked in filled(resolve_name(BODIES[url]), given, closed, set()):
            if asked.path[-1] in (*HEADERS, *KEPT_ONES):
                continue
            count += 1
            errors = []
            for body in conversations(asked.path, asked.body):
                answer = await http.post(url, json=body)
                if answer.status_code == 200 or (answer.status_code == 404 and "input_file_id" in answer.text):
                    break
                errors.append((answer.status_code, reply(answer)))
            else:
                if any(refused_by_name(asked, *error) for error in errors):
                    closed |= {asked.kind} if asked.kind else set()
                else:
                    place = ".".join(map(str, asked.path))
                    wrong.append(f"{place} of {asked.field[0].__name__}: {errors} {asked.body}"[:600])
    assert count > 0 and not wrong, "\n".join(wrong)


@pytest.mark.parametrize("url", QUERIES)
async def test_each_field_of_a_query_is_honoured_or_refused_by_name(url):
    kind, headers = QUERIES[url]
    asked = [
        a for a in filled(resolve_name(kind), {"limit": 2, "purpose": "batch"}, (), set()) if a.path[-1] not in HEADERS
    ]
    assert asked
    async with client() as http:
        for one in asked:
            query = {name: value for name, value in one.body.items() if name == one.path[0]}
            answer = await http.get(url, params=query, headers=headers)
            named = answer.status_code == 400 and refused_by_name(one, 400, reply(answer))
            assert answer.status_code == 200 or named, (query, answer.text)


def test_vendor_headers_are_ignored(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as own:
        asked = {"model": "fake", "messages": [USER], "workspace_id": "wrkspc_1", "user_profile_id": "p"}
        message = own.beta.messages.create(max_tokens=2, betas=["context-1m-2025-08-07", "of-tomorrow"], **asked)
        assert message.content and own.beta.messages.count_tokens(**asked).input_tokens
