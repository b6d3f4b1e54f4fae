"""Each field that the vendors' clients read from an answer is there, or left out for a reason."""

from __future__ import annotations

import json
from pkgutil import resolve_name
from typing import Any

import httpx
import ollama._types as ollama_types
import pytest
from huggingface_hub import TextGenerationOutput, TextGenerationStreamOutput

from kvasir.engine.front import Front
from kvasir.text.chat import ChatTemplate
from tests.serve.dialects.openai.test_chat_tools import SAID, TEMPLATE, TOOLS
from tests.serve.dialects.vendors import Field, fields_of, found_in
from tests.serve.fakes import EchoEngine, byte_tokenizer
from tests.serve.running import live

ANTHROPIC = {"anthropic-version": "2023-06-01"}
ASK = {"model": "fake", "messages": [{"role": "user", "content": SAID + "<eos>"}], "temperature": 0, "max_tokens": 300}
SCORED = {**ASK, "logprobs": True, "top_logprobs": 1}
OPTIONS = {"temperature": 0, "num_predict": 300}
OLLAMA = {"model": "fake", "logprobs": True, "top_logprobs": 1, "options": OPTIONS}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
PARAMETERS = {"details": True, "top_n_tokens": 1, "max_new_tokens": 4}
SCORED_PROMPT = {**PARAMETERS, "decoder_input_details": True, "best_of": 2, "temperature": 1.0}
INPUT = {"model": "fake", "input": SAID + "<eos>", "temperature": 0, "max_output_tokens": 300}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}

# Per kind of answer the requests that together show all of it.
ASKED: dict[str, tuple[str | type, list[tuple[str, dict]]]] = {
    "chat": (
        "openai.types.chat:ChatCompletion",
        [("/v1/chat/completions", {**SCORED, "tools": TOOLS, "service_tier": "auto"})],
    ),
    "chat stream": (
        "openai.types.chat:ChatCompletionChunk",
        [
            ("/v1/chat/completions", {**SCORED, "tools": TOOLS, "service_tier": "auto", "stream": True}),
            ("/v1/chat/completions", {**ASK, "stream": True, "stream_options": {"include_usage": True}}),
        ],
    ),
    "completion": ("openai.types:Completion", [("/v1/completions", {"model": "fake", "prompt": "hi", "logprobs": 1})]),
    "embedding": ("openai.types:CreateEmbeddingResponse", [("/v1/embeddings", {"model": "fake", "input": "hi"})]),
    "response": ("openai.types.responses:Response", [("/v1/responses", {**INPUT, "tools": [FUNCTION]})]),
    "response stream": (
        "openai.types.responses:ResponseStreamEvent",
        [("/v1/responses", {**INPUT, "tools": [FUNCTION], "stream": True})],
    ),
    "message": ("anthropic.types:Message", [("/v1/messages", {**ASK, "tools": [TOOL]})]),
    "message stream": (
        "anthropic.types:RawMessageStreamEvent",
        [("/v1/messages", {**ASK, "tools": [TOOL], "stream": True})],
    ),
    "tokens": ("anthropic.types:MessageTokensCount", [("/v1/messages/count_tokens", {"messages": ASK["messages"]})]),
    "ollama chat": (
        ollama_types.ChatResponse,
        [("/api/chat", {**OLLAMA, "messages": ASK["messages"], "tools": TOOLS})],
    ),
    "ollama generate": (ollama_types.GenerateResponse, [("/api/generate", {**OLLAMA, "prompt": SAID + "<eos>"})]),
    "ollama embed": (ollama_types.EmbedResponse, [("/api/embed", {"model": "fake", "input": "hi"})]),
    "ollama embeddings": (ollama_types.EmbeddingsResponse, [("/api/embeddings", {"model": "fake", "prompt": "hi"})]),
    "ollama show": (ollama_types.ShowResponse, [("/api/show", {"model": "fake"})]),
    "tgi": (TextGenerationOutput, [("/generate", {"inputs": "hi", "parameters": SCORED_PROMPT})]),
    "tgi stream": (TextGenerationStreamOutput, [("/generate_stream", {"inputs": "hi", "parameters": PARAMETERS})]),
}
READ: dict[str, tuple[str | type, str, dict[str, str]]] = {
    "models": ("openai.types:Model", "/v1/models", {}),
    "models of Anthropic": ("anthropic.types:ModelInfo", "/v1/models", ANTHROPIC),
    "tags": (ollama_types.ListResponse, "/api/tags", {}),
    "ps": (ollama_types.ProcessResponse, "/api/ps", {}),
}
# Why something is never there. What a vendor's type says is needed is not among them: clients fail without it.
ABSENT: dict[str, tuple[str, ...]] = {
    "the model reads and writes text": (
        *("ChatCompletionMessage.audio", "ChoiceDelta.audio", "Response.image", "GenerateResponse.image"),
        *("CompletionTokensDetails.audio_tokens", "CompletionTokensDetails.text_tokens", "Message.images"),
        *("PromptTokensDetails.audio_tokens", "PromptTokensDetails.image_tokens", "PromptTokensDetails.text_tokens"),
        *("GenerateResponse.completed", "GenerateResponse.total"),
    ),
    "its field of the request is refused": (
        "Message.diagnostics",
        *("ToolUseBlock.toolset_name", "Usage.inference_geo", "Usage.speed"),
        *("ChatCompletion.metadata", "ChatCompletion.moderation", "ChatCompletionChunk.moderation"),
        *("ChatCompletionChunk.obfuscation", "Response.moderation", "Response.prompt", "Response.conversation"),
        *("ChatCompletionMessage.annotations", "ChatCompletionMessage.function_call", "ChoiceDelta.function_call"),
        *("CompletionTokensDetails.accepted_prediction_tokens", "CompletionTokensDetails.rejected_prediction_tokens"),
        *("FunctionTool.allowed_callers", "FunctionTool.async", "FunctionTool.defer_loading"),
        *("FunctionTool.output_schema", "ResponseFunctionToolCall.async", "ResponseFunctionToolCall.caller"),
        *("ResponseFunctionToolCall.namespace", "Response.access_programs", "Response.input_transformations"),
        *("Response.prompt_cache_diagnostics", "Response.prompt_cache_options", "Response.prompt_cache_retention"),
        *("Reasoning.context", "Reasoning.generate_summary", "Reasoning.mode"),
    ),
    "no tools run here": ("Usage.server_tool_use", "MessageDeltaUsage.server_tool_use", "Response.tool_usage"),
    "no model refuses by a word of its own": ("ChoiceDelta.refusal",),
    "writing to the cache costs nothing, and is not counted": (
        *("Usage.cache_creation", "PromptTokensDetails.cache_write_tokens"),
        "InputTokensDetails.cache_write_tokens_details",
    ),
    "nobody sells these models, or takes them back": (
        *("Model.shutdown_date", "ModelInfo.line", "ModelInfo.deprecated_at", "ModelInfo.retires_at"),
        "ModelInfo.capabilities",
    ),
    "nothing is generated": (
        *("EmbedResponse.created_at", "EmbedResponse.done", "EmbedResponse.done_reason", "EmbedResponse.eval_count"),
        *("EmbedResponse.eval_duration", "EmbedResponse.prompt_eval_duration"),
    ),
    "it is in other requests of the same kind": (
        *("CompletionUsage.completion_tokens_details", "ResponseReasoningItem.encrypted_content", "Message.tool_name"),
    ),
    "a model does not say which of its texts is the last": ("ResponseOutputMessage.phase",),
}


@pytest.fixture(scope="module")
def http():
    front = Front(EchoEngine(max_model_len=1024), byte_tokenizer(), ChatTemplate(TEMPLATE), trust_special_tokens=True)
    with live(front=front) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        yield http


def objects(answer: httpx.Response) -> list[Any]:
    """What an answer holds: one object, or the lines or events of a stream."""
    assert answer.status_code == 200, answer.text
    if "event-stream" in answer.headers["content-type"]:
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]
    return [json.loads(line) for line in answer.text.splitlines()]


def named(kind: str | type) -> Any:
    return resolve_name(kind) if isinstance(kind, str) else kind


def judge(found: dict[Field, bool]) -> None:
    names = {f"{kind.__name__}.{name}" for (kind, name), there in found.items() if not there}
    needed = {f"{k.__name__}.{n}" for (k, n), there in found.items() if not there and fields_of(k)[n][1]}
    wrong = needed | names - {name for listed in ABSENT.values() for name in listed}
    assert found and not wrong, sorted(wrong)


@pytest.mark.few(6)
@pytest.mark.parametrize("name", ASKED)
def test_each_field_of_an_answer_is_there_or_has_a_reason(http, name):
    kind, requests = ASKED[name]
    found: dict[Field, bool] = {}
    for path, body in requests:
        for answer in objects(http.post(path, json=body)):
            found_in(named(kind), answer, found)
    judge(found)


@pytest.mark.parametrize("name", READ)
def test_each_field_of_a_list_is_there_or_has_a_reason(http, name):
    kind, path, headers = READ[name]
    found: dict[Field, bool] = {}
    for answer in objects(http.get(path, headers=headers)):
        found_in(list[named(kind)] if "data" in answer else named(kind), answer.get("data", answer), found)
    judge(found)
