"""Converts a conversation to a prompt that fits: messages as templates read them, thinking, truncation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.engine.front import Front
from kvasir.errors import InvalidRequest, TemplateError, TemplateTooLong, TextTooLong
from kvasir.serve.conversation.thinking import LEVELS
from kvasir.serve.dialects.ollama.wire import OllamaMessage
from kvasir.serve.http.wire import refuse_fields

Messages = Sequence[Mapping[str, Any]]


def to_messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """The messages as templates read them. Calls without an id get one. Tool results, which this API matches by the
    tool's name, get the id of their call."""
    result: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # (id, name) of calls without a result
    count = 0
    for i, message in enumerate(messages):
        refuse_fields(message, f"messages.{i}")
        made: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking:
            made["reasoning_content"] = message.thinking
        if message.tool_calls:
            made["tool_calls"] = []
            for call in message.tool_calls:
                count += 1
                id, name = call.id or f"call{count:05}", call.function.name
                function = {"name": name, "arguments": call.function.arguments or {}}
                made["tool_calls"].append({"id": id, "type": "function", "function": function})
                open_calls.append((id, name))
        if message.role == "tool":
            answered = _answered(open_calls, message)
            made |= {"name": answered[1], "tool_call_id": answered[0]}
        result.append(made)
    return result


def _answered(open_calls: list[tuple[str, str]], message: OllamaMessage) -> tuple[str, str]:
    """The (id, name) of the call that a tool message answers, which is removed from `open_calls`."""
    by_id = (c for c in open_calls if c[0] == message.tool_call_id)
    by_name = (c for c in open_calls if message.tool_name in (None, c[1]))
    found = next(by_id, None) if message.tool_call_id else next(by_name, None)
    if found:
        open_calls.remove(found)
    own = (message.tool_call_id or "call00000", message.tool_name or "")
    return (found[0], message.tool_name or found[1]) if found else own


def thinking_variables(think: bool | str | None, front: Front, tools: object, name: str) -> dict[str, Any]:
    """The template's variables for `think`; the server's if it is not given. Raises InvalidRequest."""
    if think is None:
        return dict(front.reader.default_variables(tools))
    switch = front.reader.switch(tools)
    if isinstance(think, str):
        if not front.template_mentions(LEVELS, tools):
            raise InvalidRequest(f"think is {think!r}; {name!r} has no levels of thinking", "true or false", "think")
        return ({switch: True} if switch else {}) | {LEVELS: think}
    if switch:
        return {switch: think}
    if think and not _thinks(front, tools):
        raise InvalidRequest(f"{name!r} does not support thinking", "leave think out", "think")
    return {}


def must_be_kept_from_thinking(think: bool | str | None, front: Front, tools: object) -> bool:
    """Whether thinking is disabled by the request but not by the template, so that its end must be forced at once."""
    return think is False and front.reader.switch(tools) is None and _thinks(front, tools)


def _thinks(front: Front, tools: object) -> bool:
    return front.reader.format(tools).thinking is not None


class Prompter:
    """Renders one conversation, and drops its oldest messages until it fits."""

    def __init__(
        self,
        front: Front,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        trust: bool | None = None,
    ):
        """trust: whether text may contain special tokens."""
        self._front = front
        self._tools = tools
        self._variables = variables
        self._trust = trust

    async def ids(self, messages: Messages) -> tuple[int, ...]:
        """The ids of the prompt. The model continues a final message of the assistant. Raises InvalidRequest,
        TemplateError."""
        last = messages[-1]
        goes_on = last["role"] == "assistant" and bool(last["content"]) and not last.get("tool_calls")
        return await self._front.encode_chat(
            messages,
            tools=self._tools,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            variables=self._variables,
            trust_special_tokens=self._trust,
        )

    async def fitting(self, messages: Messages, most: int) -> tuple[tuple[int, ...], int]:
        """The ids of a prompt of at most `most` tokens, and the number of dropped messages. System messages and the
        last message are kept, so even the shortest prompt may be too long."""
        left_out = sum(message["role"] != "system" for message in messages[:-1])
        try:
            ids = await self.ids(messages)
        except (TextTooLong, TemplateTooLong):
            if not left_out:
                raise
        else:
            if len(ids) <= most or not left_out:
                return ids, 0
        ids = await self.ids(without(messages, left_out))
        low = 1  # the smallest number of dropped messages that fits is in [low, left_out]
        while low < left_out:
            middle = (low + left_out) // 2
            tried = await self._tried(without(messages, middle))
            if tried is not None and len(tried) <= most:
                ids, left_out = tried, middle
            else:
                low = middle + 1
        return ids, left_out

    async def _tried(self, messages: Messages) -> tuple[int, ...] | None:
        """The ids; None for an invalid conversation: it begins with a tool's result, or the template refuses it."""
        first = next(message for message in messages if message["role"] != "system")
        try:
            return None if first["role"] == "tool" else await self.ids(messages)
        except (TemplateError, TextTooLong):
            return None


def without(messages: Messages, count: int) -> list[Mapping[str, Any]]:
    """The messages without the oldest `count` non-system messages."""
    kept = []
    for message in messages:
        if message["role"] != "system" and count:
            count -= 1
        else:
            kept.append(message)
    return kept


def cut_ids(ids: Sequence[int], most: int, keep: int) -> tuple[tuple[int, ...], int]:
    """At most `most` ids, and how many were cut. The first `keep` ids (below 0: as many as fit) and the last ones are
    kept."""
    cut = len(ids) - most
    if cut <= 0:
        return tuple(ids), 0
    keep = most if keep < 0 else min(keep, most)
    return (*ids[:keep], *ids[keep + cut :]), cut
