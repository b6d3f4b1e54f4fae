"""Events read from a choice in the formats of the chat API: content, reasoning_content, tool_calls."""

from __future__ import annotations

import secrets
import string
from typing import Any

from kvasir.engine.reading import Reading
from kvasir.parse.events import Arguments, CallEnd, CallStart, Content, Event, Message, Reasoning
from kvasir.types import FinishReason

_LETTERS = string.ascii_letters + string.digits


def message_object(message: Message, reading: Reading | None) -> dict[str, Any]:
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


def call_id(own: str | None, size: int, prefix: str = "call_") -> str:
    """The model's own id of a call, if it generated one that its template accepts, otherwise a new one."""
    if own and (not size or (len(own) == size and own.isascii() and own.isalnum())):
        return own
    return "".join(secrets.choice(_LETTERS) for _ in range(size)) if size else f"{prefix}{secrets.token_hex(12)}"


def finish_reason(reason: FinishReason | None, called: bool) -> str | None:
    """The finish reason: "tool_calls" for a choice with calls that ended by itself."""
    return "tool_calls" if called and reason is FinishReason.STOP else reason
