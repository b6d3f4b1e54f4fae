"""Events read from a choice in the formats of the chat API: content, reasoning_content, tool_calls."""

from __future__ import annotations

from typing import Any

from kvasir.engine.reading import Reading
from kvasir.parse.events import Arguments, CallEnd, CallStart, Content, Event, ParsedMessage, Reasoning
from kvasir.serve.conversation.calls import call_id
from kvasir.types import FinishReason


def message_object(message: ParsedMessage, reading: Reading | None) -> dict[str, Any]:
    """The message of a complete choice."""
    content = None if message.calls and not message.content else message.content
    result: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if message.reasoning:
        result["reasoning_content"] = message.reasoning
    if message.calls:
        result["tool_calls"] = [_call(call.id, call.name, call.arguments, reading) for call in message.calls]
    return result


def event_delta(event: Event, reading: Reading | None) -> dict[str, Any] | None:
    """The `delta` of a chunk; None for an event that the API cannot express."""
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index, name, id):
            return {"tool_calls": [{"index": index, **_call(id, name, "", reading)}]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case CallEnd():
            return None


def _call(id: str | None, name: str, arguments: str, reading: Reading | None) -> dict[str, Any]:
    size = reading.format.calls.id_size if reading else 0
    return {"id": call_id(id, size), "type": "function", "function": {"name": name, "arguments": arguments}}


def finish_reason(reason: FinishReason | None, called: bool) -> str | None:
    """The finish reason: "tool_calls" for a choice with calls that ended by itself."""
    return "tool_calls" if called and reason is FinishReason.STOP else reason
