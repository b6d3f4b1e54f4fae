"""Converts a body of the Responses API to a chat: one more turn of a conversation that may be stored here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from pydantic import ValidationError

from kvasir.errors import InvalidRequest
from kvasir.serve.conversation.scheduling import Scheduling
from kvasir.serve.dialects.openai.responses.items import PREFIXES, Kept, Message, ReferenceItem, to_kept, to_messages
from kvasir.serve.dialects.openai.responses.kept import Responses, item_id
from kvasir.serve.dialects.openai.responses.wire import (
    LOGPROBS,
    AllowedToolsChoice,
    FunctionChoice,
    Prompt,
    ResponseRequest,
    TextFormat,
)
from kvasir.serve.dialects.openai.wire import ChatRequest, Samplers
from kvasir.serve.http.wire import MAX_MESSAGES, refuse_fields, renamed

# Fields that have the same name in a chat.
_SAME = ("model", "chat_template_kwargs", *Samplers.model_fields, *Scheduling.model_fields)
LONG = 256  # items
# Fields of a chat -> fields of this API.
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "structured_outputs": "text.format",
}


def check(wire: Prompt) -> None:
    """Raises InvalidRequest for unsupported fields."""
    refuse_fields(wire)
    for part, where in ((wire.reasoning, "reasoning"), (wire.text, "text")):
        if part is not None:
            refuse_fields(part, where)
    for i, tool in enumerate(wire.tools or ()):
        refuse_fields(tool, f"tools.{i}")
    if isinstance(wire, ResponseRequest):
        if wire.background and wire.store is False:
            raise InvalidRequest("background needs store", "leave store out", param="store")
        if wire.stream_options is not None:
            if not wire.stream:
                raise InvalidRequest("stream_options is only for stream=true", param="stream_options")
            if wire.stream_options.include_usage is not None or wire.stream_options.continuous_usage_stats is not None:
                raise InvalidRequest("a stream's last event always has the usage", param="stream_options")
            refuse_fields(wire.stream_options, "stream_options")
        if wire.top_logprobs and LOGPROBS not in (wire.include or ()):
            raise InvalidRequest("top_logprobs is for logprobs", f"include {LOGPROBS}", param="top_logprobs")


async def own_items(wire: Prompt, id: str, owner: str, responses: Responses) -> list[Kept]:
    """The items of the request itself, in stored form under the response's id; item references are resolved. Raises
    InvalidRequest."""
    if wire.input is None or isinstance(wire.input, str):
        text = [] if wire.input is None else [{"type": "input_text", "text": wire.input}]
        message = {"type": "message", "role": "user", "status": "completed", "content": text}
        return [{"id": item_id("msg", id, 0), **message}] if text else []
    items: list[Kept] = []
    reach = responses.reach()
    for i, item in enumerate(wire.input):
        if isinstance(item, ReferenceItem):
            try:
                found = await responses.item(owner, item.id, reach)
            except InvalidRequest as error:
                error.param = f"input.{i}.id"
                raise
            if found is None:
                raise InvalidRequest(f"there is no item {item.id!r:.80}", "give it in full", param=f"input.{i}.id")
            items.append(found)
        else:
            items.append(to_kept(item, item_id(PREFIXES[item.type], id, i), f"input.{i}"))
    return items


def check_items(earlier: Sequence[Kept], own: Sequence[Kept]) -> None:
    """Raises InvalidRequest if the items do not form a valid conversation."""
    items = (*earlier, *own)
    if not items:
        raise InvalidRequest("there is nothing to answer", "give input", param="input")
    if len(items) > MAX_MESSAGES:
        raise InvalidRequest(f"the conversation has {len(items)} items", f"at most {MAX_MESSAGES}", param="input")
    ids: set[str] = set()
    calls: set[str] = set()
    for i, item in enumerate(items, -len(earlier)):
        if item["id"] in ids:
            raise InvalidRequest(f"item {item['id']!r:.80} is there twice", "give it once", param=f"input.{i}.id")
        ids.add(item["id"])
        if item["type"] == "function_call":
            calls.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in calls:
            message = f"no function call {item['call_id']!r:.80} comes before this output of it"
            raise InvalidRequest(message, "give the call too", param=f"input.{i}.call_id")


def to_chat(wire: Prompt, items: Sequence[Kept]) -> ChatRequest:
    """The equivalent chat request. Raises InvalidRequest."""
    messages: list[Message] = to_messages(items)
    if wire.instructions is not None:
        messages.insert(0, {"role": "system", "content": wire.instructions})
    fields: dict[str, Any] = {"model": wire.model, "messages": messages, "tools": _tools(wire)}
    fields["trust_special_tokens"] = wire.trust_special_tokens
    if wire.tool_choice is not None:
        fields["tool_choice"] = _choice(wire.tool_choice)
    fields["parallel_tool_calls"] = wire.parallel_tool_calls
    if wire.reasoning is not None:
        fields["reasoning_effort"] = wire.reasoning.effort
    if wire.text is not None and wire.text.format is not None:
        fields["response_format"] = _format(wire.text.format)
    if isinstance(wire, ResponseRequest):
        fields |= {name: getattr(wire, name) for name in _SAME}
        fields["max_tokens"] = wire.max_output_tokens
        fields["service_tier"] = wire.service_tier
        if LOGPROBS in (wire.include or ()):
            fields |= {"logprobs": True, "top_logprobs": wire.top_logprobs}
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:  # for example, more calls in one turn than a message may hold
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidRequest(f"{where} of the conversation: {first['msg']}", param="input") from None


async def chat_of(wire: Prompt, items: Sequence[Kept]) -> ChatRequest:
    """As `to_chat`; converts a long conversation in a thread."""
    return to_chat(wire, items) if len(items) < LONG else await asyncio.to_thread(to_chat, wire, items)


def _tools(wire: Prompt) -> list[dict[str, Any]] | None:
    names = ("name", "description", "parameters", "strict")
    given = [{name: getattr(tool, name) for name in names} for tool in wire.tools or ()]
    return [{"type": "function", "function": tool} for tool in given] or None


def _choice(choice: str | FunctionChoice | AllowedToolsChoice) -> Any:
    match choice:
        case FunctionChoice():
            return {"type": "function", "function": {"name": choice.name}}
        case AllowedToolsChoice():
            tools = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice


def _format(format: TextFormat) -> dict[str, Any]:
    if format.type != "json_schema":
        return {"type": format.type}
    if format.schema_ is None:
        raise InvalidRequest("the schema is missing", "give schema", param="text.format.schema")
    return {"type": "json_schema", "json_schema": {"schema": format.schema_, "lenient": format.lenient}}


def named() -> AbstractContextManager[None]:
    """Makes errors of the chat use this API's field names."""
    return renamed(_NAMES)
