"""The routes that generate, one row each. The suites beside this file run over all rows, so a new route gets them by
its row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvasir.serve.dialects.anthropic.wire import MessagesRequest
from kvasir.serve.dialects.llamacpp.wire import CompletionRequest as LlamaRequest
from kvasir.serve.dialects.ollama.wire import ChatRequest as OllamaChat
from kvasir.serve.dialects.ollama.wire import GenerateRequest as OllamaGenerate
from kvasir.serve.dialects.openai.responses.wire import ResponseRequest
from kvasir.serve.dialects.openai.wire import ChatRequest, CompletionRequest
from kvasir.serve.dialects.sglang.wire import SglangRequest
from kvasir.serve.dialects.tgi.wire import CompatGenerateRequest, GenerateRequest
from kvasir.serve.http.wire import Wire

LENGTH, STOP, SEED, TEMPERATURE, DEADLINE = "length", "stop", "seed", "temperature", "deadline"


@dataclass(frozen=True, slots=True)
class Answer:
    """What the suites read from a response. tokens, prompt_tokens: None where the format does not state them. cut:
    whether the length ended it."""

    text: str
    prompt_tokens: int | None
    tokens: int | None
    cut: bool | None


@dataclass(frozen=True, slots=True)
class Row:
    """prompt: the field that holds the prompt or the messages. body: fields that every request has. places: the dotted
    path of each common parameter. whole, streamed: read a response object, and the JSON objects of a stream. streams:
    fields of a streamed request. stream_path: where it goes, if not to `path`. greedy: what makes a request greedy.
    keeps_stop: the text includes the stop string."""

    path: str
    wire: type[Wire]
    prompt: str
    places: Mapping[str, str]
    whole: Callable[[Any], Answer]
    streamed: Callable[[list[Any]], Answer]
    body: Mapping[str, Any] = field(default_factory=dict)
    streams: Mapping[str, Any] = field(default_factory=lambda: {"stream": True})
    stream_path: str = ""
    greedy: Mapping[str, Any] = field(default_factory=lambda: {TEMPERATURE: 0.0})
    keeps_stop: bool = False

    @property
    def is_chat(self) -> bool:
        return self.prompt == "messages" or self.wire is ResponseRequest

    def path_of(self, stream: bool) -> str:
        return self.stream_path or self.path if stream else self.path

    def request(self, text: str, stream: bool = False, **common: Any) -> dict[str, Any]:
        """The body that asks for this. common: by the names of `places`."""
        given: Any = [{"role": "user", "content": text}] if self.prompt == "messages" else text
        body = {**self.body, self.prompt: given, **(self.streams if stream else {})}
        for name, value in common.items():
            body = put(body, self.places[name], value)
        return body

    def rendered(self, text: str) -> str:
        """What the model reads."""
        return f"user: {text}\nassistant: " if self.is_chat else text

    def read(self, text: str, stream: bool) -> Answer:
        return self.streamed(objects(text)) if stream else self.whole(json.loads(text))


def put(body: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    name, _, inner = place.partition(".")
    return {**body, name: put(body.get(name) or {}, inner, value) if inner else value}


def objects(text: str) -> list[Any]:
    """The JSON objects of a stream of events or of lines."""
    lines = [line.removeprefix("data:").strip() for line in text.splitlines() if not line.startswith(("event:", ":"))]
    return [json.loads(line) for line in lines if line and line != "[DONE]"]


# -- OpenAI ----------------------------------------------------------------------------------------------------------


def openai_usage(text: str, body: Any, reason: str | None) -> Answer:
    usage = body["usage"]
    return Answer(text, usage["prompt_tokens"], usage["completion_tokens"], reason == "length")


def chat_whole(body: Any) -> Answer:
    [choice] = body["choices"]
    return openai_usage(choice["message"]["content"] or "", body, choice["finish_reason"])


def chat_streamed(chunks: list[Any]) -> Answer:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return openai_usage(text, chunks[-1], choices[-1]["finish_reason"])


def completion_whole(body: Any) -> Answer:
    [choice] = body["choices"]
    return openai_usage(choice["text"], body, choice["finish_reason"])


def completion_streamed(chunks: list[Any]) -> Answer:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return openai_usage("".join(c["text"] for c in choices), chunks[-1], choices[-1]["finish_reason"])


def response_whole(body: Any) -> Answer:
    text = "".join(part["text"] for item in body["output"] for part in item["content"])
    usage = body["usage"]
    return Answer(text, usage["input_tokens"], usage["output_tokens"], body["status"] == "incomplete")


def response_streamed(events: list[Any]) -> Answer:
    last = response_whole(events[-1]["response"])
    assert last.text == "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    return last


# -- Anthropic -------------------------------------------------------------------------------------------------------


CUT = ("max_tokens", "model_context_window_exceeded")


def message_whole(body: Any) -> Answer:
    text = "".join(block["text"] for block in body["content"])
    usage = body["usage"]
    read = usage["input_tokens"] + (usage["cache_read_input_tokens"] or 0)
    return Answer(text, read, usage["output_tokens"], body["stop_reason"] in CUT)


def message_streamed(events: list[Any]) -> Answer:
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    [start] = [event["message"] for event in events if event["type"] == "message_start"]
    [end] = [event for event in events if event["type"] == "message_delta"]
    usage = {**start["usage"], **end["usage"]}
    return message_whole({"content": [{"text": text}], "usage": usage, **end["delta"]})


# -- Ollama, llama.cpp, Text Generation Inference, SGLang --------------------------------------------------------------


def ollama_text(line: Any) -> str:
    return line["message"]["content"] if "message" in line else line["response"]


def ollama_streamed(lines: list[Any]) -> Answer:
    last, text = lines[-1], "".join(map(ollama_text, lines))
    assert last["done"]
    return Answer(text, last["prompt_eval_count"], last["eval_count"], last["done_reason"] == "length")


def llamacpp_streamed(parts: list[Any]) -> Answer:
    last, text = parts[-1], "".join(part["content"] for part in parts)
    assert last["stop"]
    return Answer(text, last["tokens_evaluated"], last["tokens_predicted"], last["stop_type"] == "limit")


def tgi_whole(body: Any) -> Answer:
    body = body[0] if isinstance(body, list) else body
    details = body["details"]
    return Answer(
        body["generated_text"],
        details.get("input_length"),
        details["generated_tokens"],
        details["finish_reason"] == "length",
    )


def tgi_streamed(tokens: list[Any]) -> Answer:
    return tgi_whole(tokens[-1])


def sglang_whole(body: Any) -> Answer:
    meta = body["meta_info"]
    cut = meta["finish_reason"]["type"] == "length"
    return Answer(body["text"], meta["prompt_tokens"], meta["completion_tokens"], cut)


def sglang_streamed(parts: list[Any]) -> Answer:
    return sglang_whole(parts[-1])


_OPENAI = {name: name for name in (STOP, SEED, TEMPERATURE, DEADLINE)}
_OLLAMA = {name: f"options.{name}" for name in (STOP, SEED, TEMPERATURE)}
_OLLAMA |= {LENGTH: "options.num_predict", DEADLINE: DEADLINE}
_TGI = {name: f"parameters.{name}" for name in (STOP, SEED, TEMPERATURE)}
_TGI |= {LENGTH: "parameters.max_new_tokens", DEADLINE: DEADLINE}
_SGLANG = {name: f"sampling_params.{name}" for name in (STOP, TEMPERATURE)}
_SGLANG |= {LENGTH: "sampling_params.max_new_tokens", SEED: "sampling_params.sampling_seed", DEADLINE: DEADLINE}
_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
_WHOLE = {"model": "fake", "stream": False}
_DETAILS = {"parameters": {"details": True}}

ROWS = (
    Row("/v1/chat/completions", ChatRequest, "messages", {LENGTH: "max_tokens", **_OPENAI},
        chat_whole, chat_streamed, streams=_USAGE),
    Row("/v1/completions", CompletionRequest, "prompt", {LENGTH: "max_tokens", **_OPENAI},
        completion_whole, completion_streamed, streams=_USAGE),
    Row("/v1/responses", ResponseRequest, "input", {LENGTH: "max_output_tokens", **_OPENAI},
        response_whole, response_streamed, body={"store": False}),
    Row("/v1/messages", MessagesRequest, "messages", {**_OPENAI, LENGTH: "max_tokens", STOP: "stop_sequences"},
        message_whole, message_streamed, body={"max_tokens": 50}),
    Row("/api/chat", OllamaChat, "messages", _OLLAMA,
        lambda body: ollama_streamed([body]), ollama_streamed, body=_WHOLE),
    Row("/api/generate", OllamaGenerate, "prompt", _OLLAMA,
        lambda body: ollama_streamed([body]), ollama_streamed, body={**_WHOLE, "raw": True}),
    Row("/completion", LlamaRequest, "prompt", {LENGTH: "n_predict", **_OPENAI},
        lambda body: llamacpp_streamed([body]), llamacpp_streamed),
    Row("/generate", GenerateRequest, "inputs", _TGI, tgi_whole, tgi_streamed, body=_DETAILS, streams={},
        stream_path="/generate_stream", greedy={}, keeps_stop=True),
    Row("/", CompatGenerateRequest, "inputs", _TGI, tgi_whole, tgi_streamed, body=_DETAILS, greedy={},
        keeps_stop=True),
    Row("/sglang/generate", SglangRequest, "text", _SGLANG, sglang_whole, sglang_streamed),
)  # fmt: skip
PATHS = {row.path: row for row in ROWS}
