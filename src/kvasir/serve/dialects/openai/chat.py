"""POST /v1/chat/completions

Tools are rendered into the prompt, and the output is parsed for calls of them; where a tool choice must be enforced,
the output follows a grammar. Reasoning is returned separately from the content, as reasoning_content.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.engine.answer import Answer, TextDelta
from kvasir.engine.reading import Reading
from kvasir.errors import InvalidRequest
from kvasir.parse.events import CallStart
from kvasir.serve.conversation.chat_format import (
    ChatTool,
    NamedChoice,
    NamedFunction,
    custom_names,
    to_messages,
    to_tools,
)
from kvasir.serve.conversation.drafting import prediction_of, speculation_of
from kvasir.serve.conversation.event_ids import EventIds, with_event_ids
from kvasir.serve.conversation.limits import charge, check_logprobs
from kvasir.serve.conversation.logprobs import chat_logprobs
from kvasir.serve.conversation.messages import Conversation
from kvasir.serve.conversation.outcome import check_finish
from kvasir.serve.conversation.progress import check_numbering, progress_object
from kvasir.serve.conversation.request import prompt_ids, to_request
from kvasir.serve.conversation.scheduling import scheduling_fields
from kvasir.serve.conversation.tools import Tools
from kvasir.serve.conversation.trust import trust_of
from kvasir.serve.dialects.openai.calls import MessageDeltas, MessageStyle, ReasoningText
from kvasir.serve.dialects.openai.extensions import template_variables, thinking_budget, thinking_fields, truncated
from kvasir.serve.dialects.openai.params import TIERS, check_stream_options, served_tier, to_params
from kvasir.serve.dialects.openai.shapes import (
    Chunks,
    Timings,
    error_event,
    error_response,
    head_object,
    prompt_logprobs,
    usage_object,
)
from kvasir.serve.dialects.openai.structured import named
from kvasir.serve.dialects.openai.transfer import transfer_fields, transfer_object
from kvasir.serve.dialects.openai.wire import ChatRequest
from kvasir.serve.hosting.catalogue import serving_of
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.asgi import while_connected
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.responses import write_json
from kvasir.serve.http.sse import DONE, STREAMED, EventStream
from kvasir.serve.http.wire import refuse_fields
from kvasir.types import Request, SamplingParams, Usage

router = APIRouter(route_class=JsonRoute)
_PREFIX = "chatcmpl-"


@router.post("/v1/chat/completions", tags=["openai"], responses=STREAMED)
async def chat_completions(wire: ChatRequest, request: HTTPRequest) -> Response:
    serving = await serving_of(request, wire.model, adapter=wire.lora_path, param="lora_path")
    begun, created = time.monotonic(), int(time.time())
    core, reading = await _to_core(wire, serving, request)
    [core], ids = with_event_ids(request, serving, [core], stream=bool(wire.stream), prefix=_PREFIX)
    check_numbering(wire.return_progress, ids)
    await charge(serving, [core], request, whole=not wire.stream)
    if wire.stream:
        events = chat_events(wire, core, reading, serving, ids.created if ids else created, begun, ids)
        how = {"to_response": error_response, "to_event": error_event, "ping": serving.settings.ping}
        return EventStream(events, **how, numbering=ids)
    answers = await while_connected(request.receive, serving.front.complete(core, reading))
    heavy = bool(wire.logprobs) or wire.prompt_logprobs is not None
    return await write_json(heavy, to_response, wire, core, reading, answers, serving, created)


# -- to_conversation ---------------------------------------------------------------------------------------


def to_conversation(wire: ChatRequest, serving: Serving) -> Conversation:
    """The conversation of a chat. Raises InvalidRequest."""
    tools, front = _tools(wire), serving.front
    level, switch, _ = thinking_fields(wire, wire.reasoning_effort)
    variables = template_variables(wire, level, switch, front, tools.shown) | (wire.chat_template_kwargs or {})
    if wire.chat_template is not None and not serving.settings.trust_request_chat_template:
        hint = "start it with --trust-request-chat-template, or set the template with --chat-template"
        raise InvalidRequest("this server takes no templates from requests", hint, param="chat_template")
    return Conversation(
        serving.conversation(to_messages(wire.messages, front, tools)),
        tools,
        variables,
        template=wire.chat_template,
        add_generation_prompt=wire.add_generation_prompt is not False,
        continue_final_message=bool(wire.continue_final_message),
        add_special_tokens=bool(wire.add_special_tokens),
    )


def _tools(wire: ChatRequest) -> Tools:
    """The tools of a chat, also of one in the API's first version. Raises InvalidRequest."""
    if not _is_legacy(wire):
        return to_tools(wire.tools, wire.tool_choice, wire.parallel_tool_calls)
    if wire.tools is not None or wire.tool_choice is not None:
        raise InvalidRequest("functions and tools cannot be combined", "send tools and tool_choice", param="functions")
    call = wire.function_call
    choice = NamedChoice(type="function", function=call) if isinstance(call, NamedFunction) else call
    return to_tools([ChatTool(type="function", function=one) for one in wire.functions or ()], choice, parallel=False)


def _is_legacy(wire: ChatRequest) -> bool:
    return bool(wire.functions) or wire.function_call is not None


def style_of(wire: ChatRequest, reading: Reading | None) -> MessageStyle:
    """How the messages of a chat's choices are written."""
    shown: ReasoningText = "apart"
    if wire.include_reasoning is False or (wire.reasoning and wire.reasoning.exclude):
        shown = "left out"
    elif wire.separate_reasoning is False:
        shown = "in the content"
    return MessageStyle(reading, shown, _is_legacy(wire), custom_names(wire.tools))


async def _to_core(wire: ChatRequest, serving: Serving, request: HTTPRequest) -> tuple[Request, Reading | None]:
    """The engine's request, and how its output is parsed. Raises InvalidRequest for unsupported requests,
    TemplateError, ScopeNeeded."""
    check_logprobs(serving, top_logprobs=wire.top_logprobs, prompt_logprobs=wire.prompt_logprobs)
    _refuse(wire)
    conversation = to_conversation(wire, serving)
    cuts = wire.truncate_prompt_tokens is not None
    ids = await prompt_ids(conversation, serving, trust_of(wire, serving, request), "count" if cuts else "context")
    ids = truncated(ids, wire, serving.front.info.max_model_len)
    fields = scheduling_fields(wire, serving, request, TIERS.get(wire.service_tier or ""))
    fields["no_cache"] |= wire.cache_prompt is False
    fields["progress"] = bool(wire.stream and wire.return_progress)
    fields |= speculation_of(wire) | await prediction_of(wire.prediction, serving)
    fields |= transfer_fields(wire.kv_transfer_params, serving.front.info, bool(wire.stream))
    length = _length(wire)
    legacy = {"tools": "functions", "tool_choice": "function_call"} if _is_legacy(wire) else {}
    with named(wire, max_tokens=length, **legacy):
        logprobs = (wire.top_logprobs or 0) if wire.logprobs else None
        given = {"max_tokens": getattr(wire, length), "logprobs": logprobs}
        params = _with_budget(to_params(wire, serving.front.info, serving.own, **given), wire, conversation, serving)
        id = _PREFIX + secrets.token_hex(12)
        return await to_request(conversation, ids, params, serving, id=id, fields=fields)


def _with_budget(
    params: SamplingParams, wire: ChatRequest, conversation: Conversation, serving: Serving
) -> SamplingParams:
    """Bounds the reasoning as the fields of other servers say, unless `thinking_token_budget` does."""
    _, switch, budget = thinking_fields(wire, wire.reasoning_effort)
    budget = thinking_budget(switch, budget, serving.front, conversation.tools.shown)
    if budget is None or params.thinking_token_budget is not None:
        return params
    return replace(params, thinking_token_budget=budget)


def _length(wire: ChatRequest) -> str:
    """The field that limits the choice's length: the smaller one if both are given."""
    given = [n for n in ("max_tokens", "max_completion_tokens") if getattr(wire, n) is not None]
    return min(given, key=lambda name: getattr(wire, name), default="max_tokens")


def _refuse(wire: ChatRequest) -> None:
    refuse_fields(wire)
    check_stream_options(wire)
    if wire.top_logprobs is not None and not wire.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
    if wire.stream and wire.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    if wire.continue_final_message and wire.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt cannot be combined",
            param="add_generation_prompt",
        )


# -- the whole response ------------------------------------------------------------------------------------


def to_response(
    wire: ChatRequest, core: Request, reading: Reading | None, answers: list[Answer], serving: Serving, created: int
) -> dict[str, Any]:
    tier = served_tier(wire.service_tier, core.slo)
    response = head_object(serving, "chat.completion", core.id, created, tier)
    style = style_of(wire, reading)
    response["choices"] = [_choice(wire, core, style, answer) for answer in answers]
    response["usage"] = usage_object([[a.usage for a in answers]], len(core.prompt_ids), wire.prediction is not None)
    if answers[0].prompt_logprobs is not None:
        response["prompt_logprobs"] = prompt_logprobs(answers[0].prompt_logprobs)
    if wire.return_token_ids:
        response["prompt_token_ids"] = core.prompt_ids
    return response | transfer_object(core, serving.front.info)


def _choice(wire: ChatRequest, core: Request, style: MessageStyle, answer: Answer) -> dict[str, Any]:
    check_finish(answer, core.id)
    message = answer.message
    choice: dict[str, Any] = {
        "index": answer.index,
        "message": style.message(message),
        "logprobs": chat_logprobs(answer.logprobs) if wire.logprobs else None,
        "finish_reason": style.finish_reason(answer.finish_reason, bool(message.calls)),
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
    wire: ChatRequest,
    core: Request,
    reading: Reading | None,
    serving: Serving,
    created: int,
    begun: float,
    ids: EventIds | None = None,
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
    style = style_of(wire, reading)
    messages: dict[int, MessageDeltas] = {}

    def total() -> dict[str, Any]:
        return usage_object([usages.values()], len(core.prompt_ids), wire.prediction is not None)

    async with aclosing(serving.front.stream(core, reading, ids and ids.through)) as deltas:
        async for delta in deltas:
            check_finish(delta, core.id)
            if delta.progress is not None:
                if not usages:  # it is computed again after the engine has died
                    yield chunks.event([_chunk(delta, {})], prompt_progress=progress_object(delta))
                continue
            first_of_all, first = not usages, delta.index not in usages
            usages[delta.index] = delta.usage
            usage = total() if always_usage else None
            if any(isinstance(event, CallStart) for event in delta.events):
                called.add(delta.index)
            message = messages.setdefault(delta.index, MessageDeltas(style))
            choices, timed = _deltas(wire, core, message, delta, first, delta.index in called), timings.of(delta)
            if first_of_all and wire.return_token_ids:
                role = [choices.pop(0)]
                yield chunks.event(role, usage, prompt_token_ids=core.prompt_ids, **timed)
            if choices:
                yield b"".join([chunks.event([choice], usage, **timed) for choice in choices])
    if final_usage:
        yield chunks.event([], total())
    yield DONE


def _deltas(
    wire: ChatRequest, core: Request, message: MessageDeltas, delta: TextDelta, is_first: bool, called: bool
) -> list[dict[str, Any]]:
    """The chunk choices of a delta: the role in the first, then events read from the text, then the finish reason."""
    choices = []
    if is_first:
        choices.append(_chunk(delta, {"role": "assistant", "content": ""}))
    pieces = [_chunk(delta, piece) for piece in message.of(delta.events, bool(delta.finish_reason))]
    if delta.token_ids and (wire.logprobs or wire.return_token_ids):
        pieces = pieces or [_chunk(delta, {"content": ""})]
        if wire.logprobs:
            pieces[0]["logprobs"] = chat_logprobs(delta.logprobs, drafts=bool(wire.timings_per_token))
        if wire.return_token_ids:
            pieces[0]["token_ids"] = delta.token_ids
    choices += pieces
    if delta.finish_reason:
        reason = message.style.finish_reason(delta.finish_reason, called)
        choices.append(_chunk(delta, {}) | {"finish_reason": reason, **ending(core, delta)})
    return choices


def _chunk(delta: TextDelta, content: dict[str, Any]) -> dict[str, Any]:
    return {"index": delta.index, "delta": content, "logprobs": None, "finish_reason": None}
