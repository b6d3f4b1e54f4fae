"""POST /v1/chat/completions

Tools are rendered into the prompt, and the output is parsed for calls of them; where a tool choice must be enforced,
the output follows a grammar. Reasoning is returned separately from the content, as reasoning_content.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.engine.answer import Answer, TextDelta
from kvasir.engine.front import Bound
from kvasir.engine.reading import Reading
from kvasir.engine.thinking import may_think
from kvasir.errors import InvalidRequest
from kvasir.parse.events import CallStart
from kvasir.serve.conversation.limits import charge, check_logprobs
from kvasir.serve.conversation.outcome import check_finish
from kvasir.serve.conversation.scheduling import scheduling_fields
from kvasir.serve.conversation.thinking import effort_variables
from kvasir.serve.conversation.trust import trust_of
from kvasir.serve.dialects.openai.calls import event_delta, finish_reason, message_object
from kvasir.serve.dialects.openai.params import TIERS, check_stream_options, served_tier, to_params
from kvasir.serve.dialects.openai.shapes import (
    STREAMED,
    Chunks,
    Timings,
    chat_logprobs,
    error_event,
    error_response,
    head_object,
    prompt_logprobs,
    usage_object,
)
from kvasir.serve.dialects.openai.structured import named
from kvasir.serve.dialects.openai.tools import callable_tools, follows, shown_tools, tool_grammar
from kvasir.serve.dialects.openai.wire import ChatRequest, Message, Part
from kvasir.serve.hosting.catalogue import serving_of
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.asgi import while_connected
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.responses import write_json
from kvasir.serve.http.sse import DONE, EventStream
from kvasir.serve.http.wire import refuse_fields
from kvasir.types import Request, SamplingParams, Usage

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", tags=["openai"], responses=STREAMED)
async def chat_completions(wire: ChatRequest, request: HTTPRequest) -> Response:
    serving = await serving_of(request, wire.model)
    begun, created = time.monotonic(), int(time.time())
    core, reading = await to_request(wire, serving, request)
    charge(serving, [core], request, whole=not wire.stream)
    if wire.stream:
        events = chat_events(wire, core, reading, serving, created, begun)
        return EventStream(events, to_response=error_response, to_event=error_event, ping=serving.settings.ping)
    answers = await while_connected(request.receive, serving.front.complete(core, reading))
    heavy = bool(wire.logprobs) or wire.prompt_logprobs is not None
    return await write_json(heavy, to_response, wire, core, reading, answers, serving, created)


# -- to_request --------------------------------------------------------------------------------------------


async def to_request(wire: ChatRequest, serving: Serving, request: HTTPRequest) -> tuple[Request, Reading | None]:
    """The core's request, and how its output is parsed. Raises InvalidRequest for unsupported requests,
    TemplateError."""
    check_logprobs(serving, top_logprobs=wire.top_logprobs, prompt_logprobs=wire.prompt_logprobs)
    _refuse(wire)
    prompt_ids = await chat_ids(wire, serving, request)
    front = serving.front
    fields = scheduling_fields(wire, serving, request, TIERS.get(wire.service_tier or ""))
    length = _length(wire)
    with named(wire, max_tokens=length):
        logprobs = (wire.top_logprobs or 0) if wire.logprobs else None
        params = to_params(wire, front.info, serving.own, max_tokens=getattr(wire, length), logprobs=logprobs)
        reading = front.reader.reading(prompt_ids, callable_tools(wire), await _thinks(wire, serving, params))
        grammar = await tool_grammar(wire, front, reading, params)
        if grammar is not None:  # the grammar includes the structure of the content
            params = replace(params, structured_outputs=None)
            fields["grammar"] = grammar
        await front.learn(params)
        id = f"chatcmpl-{secrets.token_hex(12)}"
        return front.resolve(prompt_ids, params, id=id, param="messages", **fields), reading


def _length(wire: ChatRequest) -> str:
    """The field that limits the choice's length: the smaller one if both are given."""
    given = [n for n in ("max_tokens", "max_completion_tokens") if getattr(wire, n) is not None]
    return min(given, key=lambda name: getattr(wire, name), default="max_tokens")


def _refuse(wire: ChatRequest) -> None:
    refuse_fields(wire)
    check_stream_options(wire)
    if wire.top_logprobs is not None and not wire.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
    if wire.timings_per_token and not wire.stream:
        raise InvalidRequest("timings_per_token needs stream=true", param="timings_per_token")
    if wire.stream and wire.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    if wire.continue_final_message and wire.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other",
            param="add_generation_prompt",
        )


async def chat_ids(
    wire: ChatRequest, serving: Serving, request: HTTPRequest, bound: Bound = "context"
) -> tuple[int, ...]:
    """The prompt of a conversation, including the tools shown to the model. bound: as in `Front.encode`.

    Raises ScopeNeeded.
    """
    messages, template = _shown(wire, serving)
    return await serving.front.encode_chat(
        messages,
        add_special_tokens=bool(wire.add_special_tokens),
        trust_special_tokens=trust_of(wire, serving, request),
        bound=bound,
        **template,
    )


async def _thinks(wire: ChatRequest, serving: Serving, params: SamplingParams) -> bool:
    """Whether reasoning may precede the constrained part of the choice."""
    if not follows(wire, params):
        return True
    messages, template = _shown(wire, serving)
    return await may_think(serving.front, messages, **template)


async def chat_text(wire: ChatRequest, serving: Serving) -> tuple[str, Sequence[tuple[int, int]]]:
    """The prompt as a text, and its parts that must not contain control tokens."""
    messages, template = _shown(wire, serving)
    rendered = await serving.front.render_chat(messages, **template)
    return rendered.text, serving.front.foreign(rendered, template["tools"])


def _shown(wire: ChatRequest, serving: Serving) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any]]:
    """The inputs of the template."""
    front = serving.front
    tools = shown_tools(wire)
    variables = effort_variables(wire.reasoning_effort, front, tools) | (wire.chat_template_kwargs or {})
    knows_developer = any(front.template_mentions(f"{q}developer{q}", tools) for q in "'\"")
    roles = {"developer": "developer" if knows_developer else "system", "function": "tool"}
    return serving.conversation([to_message(m, i, roles) for i, m in enumerate(wire.messages)]), {
        "tools": tools,
        "add_generation_prompt": wire.add_generation_prompt is not False,
        "continue_final_message": bool(wire.continue_final_message),
        "variables": variables,
    }


def to_message(message: Message, index: int, roles: dict[str, str]) -> dict[str, Any]:
    """The message as templates read it. `roles` replaces roles that this template does not know."""
    where = f"messages.{index}"
    if message.audio is not None:
        raise InvalidRequest("audio is not supported", param=f"{where}.audio")
    if message.content is None and message.role != "assistant":
        raise InvalidRequest("content is missing", param=f"{where}.content")
    result: dict[str, Any] = {"role": roles.get(message.role, message.role)}
    content = message.content
    if isinstance(content, list):
        content = [to_part(part, f"{where}.content.{i}") for i, part in enumerate(content)]
    result["content"] = content if content is not None else message.refusal
    calls = [call.model_dump(exclude={"index"}, exclude_none=True) for call in message.tool_calls or ()]
    if message.function_call is not None:
        calls.append({"type": "function", "function": message.function_call.model_dump()})
    if calls:
        result["tool_calls"] = calls
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            result[name] = value
    return result


def to_part(part: Part, where: str) -> dict[str, str]:
    """A text part. Raises InvalidRequest naming any other kind."""
    text = {"text": part.text, "refusal": part.refusal}.get(part.type)
    if text is None or part.image_url or part.input_audio or part.file:
        raise InvalidRequest(
            f"a content part of type {part.type[:40]!r} is not supported",
            "this model reads text",
            param=where,
        )
    if part.prompt_cache_breakpoint is not None:
        raise InvalidRequest("it is not supported", "leave it out", param=f"{where}.prompt_cache_breakpoint")
    return {"type": "text", "text": text}


# -- the whole response ------------------------------------------------------------------------------------


def to_response(
    wire: ChatRequest, core: Request, reading: Reading | None, answers: list[Answer], serving: Serving, created: int
) -> dict[str, Any]:
    tier = served_tier(wire.service_tier, core.slo)
    response = head_object(serving, "chat.completion", core.id, created, tier)
    response["choices"] = [_choice(wire, core, reading, answer) for answer in answers]
    response["usage"] = usage_object([[a.usage for a in answers]], len(core.prompt_ids))
    if answers[0].prompt_logprobs is not None:
        response["prompt_logprobs"] = prompt_logprobs(answers[0].prompt_logprobs)
    if wire.return_token_ids:
        response["prompt_token_ids"] = core.prompt_ids
    return response


def _choice(wire: ChatRequest, core: Request, reading: Reading | None, answer: Answer) -> dict[str, Any]:
    check_finish(answer, core.id)
    message = answer.message
    choice: dict[str, Any] = {
        "index": answer.index,
        "message": message_object(message, reading),
        "logprobs": chat_logprobs(answer.logprobs) if wire.logprobs else None,
        "finish_reason": finish_reason(answer.finish_reason, bool(message.calls)),
        **ending(core, answer),
    }
    if wire.return_token_ids:
        choice["token_ids"] = answer.token_ids
    return choice


def ending(core: Request, answer: Answer | TextDelta) -> dict[str, Any]:
    """Additional fields: the stop string or id that ended the choice, and the seed that reproduces it."""
    seed = {} if core.params.greedy else {"seed": core.params.seed}
    return {"stop_reason": answer.stop_reason, **seed}


# -- the stream --------------------------------------------------------------------------------------------


async def chat_events(
    wire: ChatRequest, core: Request, reading: Reading | None, serving: Serving, created: int, begun: float
) -> AsyncGenerator[bytes]:
    """The chunks of all choices, the usage if requested, and the end marker. begun: start of the request, in seconds of
    time.monotonic."""
    options = wire.stream_options
    final_usage = bool(options and options.include_usage)
    always_usage = bool(options and options.continuous_usage_stats)
    tier = served_tier(wire.service_tier, core.slo)
    chunks = Chunks(serving, "chat.completion.chunk", core.id, created, with_usage=final_usage, tier=tier)
    timings = Timings(bool(wire.timings_per_token), begun)
    usages: dict[int, Usage] = {}
    called: set[int] = set()  # indices of the choices with calls
    async with aclosing(serving.front.stream(core, reading)) as deltas:
        async for delta in deltas:
            check_finish(delta, core.id)
            first_of_all, first = not usages, delta.index not in usages
            usages[delta.index] = delta.usage
            usage = usage_object([usages.values()], len(core.prompt_ids)) if always_usage else None
            if any(isinstance(event, CallStart) for event in delta.events):
                called.add(delta.index)
            choices, timed = _deltas(wire, core, reading, delta, first, delta.index in called), timings.of(delta)
            if first_of_all and wire.return_token_ids:
                role = [choices.pop(0)]
                yield chunks.event(role, usage, prompt_token_ids=core.prompt_ids, **timed)
            if choices:
                yield b"".join([chunks.event([choice], usage, **timed) for choice in choices])
    if final_usage:
        yield chunks.event([], usage_object([usages.values()], len(core.prompt_ids)))
    yield DONE


def _deltas(
    wire: ChatRequest, core: Request, reading: Reading | None, delta: TextDelta, is_first: bool, called: bool
) -> list[dict[str, Any]]:
    """The chunk choices of a delta: the role in the first, then events read from the text, then the finish reason."""
    choices = []
    if is_first:
        choices.append(_chunk(delta, {"role": "assistant", "content": ""}))
    pieces = [_chunk(delta, piece) for event in delta.events if (piece := event_delta(event, reading))]
    if delta.token_ids and (wire.logprobs or wire.return_token_ids):
        pieces = pieces or [_chunk(delta, {"content": ""})]
        if wire.logprobs:
            pieces[0]["logprobs"] = chat_logprobs(delta.logprobs)
        if wire.return_token_ids:
            pieces[0]["token_ids"] = delta.token_ids
    choices += pieces
    if delta.finish_reason:
        reason = finish_reason(delta.finish_reason, called)
        choices.append(_chunk(delta, {}) | {"finish_reason": reason, **ending(core, delta)})
    return choices


def _chunk(delta: TextDelta, content: dict[str, Any]) -> dict[str, Any]:
    return {"index": delta.index, "delta": content, "logprobs": None, "finish_reason": None}
