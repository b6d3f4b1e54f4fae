"""Converts a body of the Responses API: one more turn of a conversation that may be stored here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager

from starlette.requests import Request as HTTPRequest

from kvasir.engine.reading import Reading, TextGrammar
from kvasir.errors import InvalidRequest
from kvasir.serve.conversation.chat_format import template_roles
from kvasir.serve.conversation.custom import custom_function, text_grammar
from kvasir.serve.conversation.drafting import speculation_of
from kvasir.serve.conversation.limits import check_logprobs
from kvasir.serve.conversation.messages import Conversation
from kvasir.serve.conversation.request import prompt_ids, to_request
from kvasir.serve.conversation.sampling import asked_fields, sampling_params
from kvasir.serve.conversation.scheduling import scheduling_fields
from kvasir.serve.conversation.thinking import effort_variables
from kvasir.serve.conversation.tools import Tool as ShownTool
from kvasir.serve.conversation.tools import ToolChoice, Tools
from kvasir.serve.conversation.trust import trust_of
from kvasir.serve.dialects.openai.params import TIERS
from kvasir.serve.dialects.openai.responses.items import PREFIXES, ReferenceItem, to_kept, to_messages
from kvasir.serve.dialects.openai.responses.wire import (
    LOGPROBS,
    AllowedToolsChoice,
    CustomTextFormat,
    CustomTool,
    FunctionTool,
    NamedTool,
    Prompt,
    ResponseRequest,
)
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.wire import MAX_MESSAGES, MAX_TOOLS, refuse_fields, renamed
from kvasir.serve.records.responses import Kept, Responses, item_id
from kvasir.types import Request, StructuredOutputs

LONG = 256  # items
# Our fields -> fields of this API.
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
                raise InvalidRequest("stream_options is allowed only with stream=true", param="stream_options")
            if wire.stream_options.include_usage is not None or wire.stream_options.continuous_usage_stats is not None:
                raise InvalidRequest("a stream's last event always has the usage", param="stream_options")
            refuse_fields(wire.stream_options, "stream_options")
        if wire.top_logprobs and LOGPROBS not in (wire.include or ()):
            raise InvalidRequest("top_logprobs needs logprobs", f"include {LOGPROBS}", param="top_logprobs")


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
        raise InvalidRequest("the input is empty", "give input", param="input")
    if len(items) > MAX_MESSAGES:
        raise InvalidRequest(f"the conversation has {len(items)} items", f"at most {MAX_MESSAGES}", param="input")
    ids: set[str] = set()
    calls: set[tuple[str, str]] = set()
    for i, item in enumerate(items, -len(earlier)):
        if item["id"] in ids:
            raise InvalidRequest(f"item {item['id']!r:.80} is given twice", "send it once", param=f"input.{i}.id")
        ids.add(item["id"])
        kind, of, _ = item["type"].partition("_output")
        if "call_id" in item and not of:
            calls.add((kind, item["call_id"]))
        elif "call_id" in item and (kind, item["call_id"]) not in calls:
            message = f"no {kind.replace('_', ' ')} {item['call_id']!r:.80} comes before this output of it"
            raise InvalidRequest(message, "give the call too", param=f"input.{i}.call_id")


async def to_conversation(wire: Prompt, items: Sequence[Kept], serving: Serving) -> Conversation:
    """The conversation of all items. A long one is converted in a thread. Raises InvalidRequest."""
    if len(items) < LONG:
        return _to_conversation(wire, items, serving)
    return await asyncio.to_thread(_to_conversation, wire, items, serving)


def _to_conversation(wire: Prompt, items: Sequence[Kept], serving: Serving) -> Conversation:
    front, tools = serving.front, _tools(wire)
    variables = effort_variables(wire.reasoning.effort if wire.reasoning else None, front, tools.shown)
    if isinstance(wire, ResponseRequest):
        variables |= wire.chat_template_kwargs or {}
    messages = to_messages(items)
    if any(len(message.get("tool_calls", ())) > MAX_TOOLS for message in messages):
        raise InvalidRequest("one turn of the conversation has too many calls", f"at most {MAX_TOOLS}", param="input")
    if wire.instructions is not None:
        messages.insert(0, {"role": "system", "content": wire.instructions})
    roles = template_roles(front, tools)
    for message in messages:
        message["role"] = roles.get(message["role"], message["role"])
    return Conversation(serving.conversation(messages), tools, variables)


async def to_core(
    wire: ResponseRequest, conversation: Conversation, serving: Serving, request: HTTPRequest
) -> tuple[Request, Reading | None]:
    """The engine's request, and how its output is parsed. Raises InvalidRequest, TemplateError, ScopeNeeded,
    ClassNotAllowed."""
    check_logprobs(serving, top_logprobs=wire.top_logprobs)
    ids = await prompt_ids(conversation, serving, trust_of(wire, serving, request))
    fields = scheduling_fields(wire, serving, request, TIERS.get(wire.service_tier or "")) | speculation_of(wire)
    asked = asked_fields(wire, "openai") | {"structured_outputs": _structure(wire)}
    logprobs = (wire.top_logprobs or 0) if LOGPROBS in (wire.include or ()) else None
    given = {"max_tokens": wire.max_output_tokens, "logprobs": logprobs}
    params = sampling_params(asked, serving.front.info, serving.own, **given)
    return await to_request(conversation, ids, params, serving, fields=fields)


def _tools(wire: Prompt) -> Tools:
    texts: dict[str, TextGrammar] = {}
    shown = [_tool(tool, f"tools.{i}", texts) for i, tool in enumerate(wire.tools or ())]
    match wire.tool_choice:
        case NamedTool():
            choice = ToolChoice.one(wire.tool_choice.name)
        case AllowedToolsChoice():
            choice = ToolChoice(wire.tool_choice.mode, frozenset(tool.name for tool in wire.tool_choice.tools))
        case mode:
            choice = ToolChoice(mode or "auto")
    return Tools(shown, choice, wire.parallel_tool_calls, texts)


def _tool(tool: FunctionTool | CustomTool, where: str, texts: dict[str, TextGrammar]) -> ShownTool:
    """A tool as templates read it. texts: gets the grammar of a custom tool."""
    if isinstance(tool, FunctionTool):
        names = ("name", "description", "parameters", "strict")
        return {"type": "function", "function": {n: v for n in names if (v := getattr(tool, n)) is not None}}
    format = tool.format or CustomTextFormat(type="text")
    if grammar := text_grammar(format.type, format.syntax, format.definition, f"{where}.format"):
        texts[tool.name] = grammar
    return custom_function(tool.name, tool.description, grammar)


def _structure(wire: ResponseRequest) -> StructuredOutputs | None:
    format = wire.text.format if wire.text else None
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return StructuredOutputs(json_object=True)
    if format.schema_ is None:
        raise InvalidRequest("the schema is missing", "give schema", param="text.format.schema")
    return StructuredOutputs(json=format.schema_, lenient=bool(format.lenient))


def named() -> AbstractContextManager[None]:
    """Makes errors use this API's field names."""
    return renamed(_NAMES)
