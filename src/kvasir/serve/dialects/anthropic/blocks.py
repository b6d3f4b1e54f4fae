"""Events read from a choice, as the content blocks of a message: complete, or as stream events.

A block holds consecutive events of one kind: text, thinking, or one call. So a stream has the same blocks as the
complete message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from pydantic_core import from_json

from kvasir.engine.reading import Reading
from kvasir.parse.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning
from kvasir.serve.conversation.calls import call_id
from kvasir.serve.dialects.anthropic.prompt import signature


class Blocks:
    """The blocks of one choice, as they come. omitted: thinking is not shown."""

    def __init__(self, reading: Reading | None, omitted: bool = False):
        self._reading = reading
        self._omitted = omitted
        self._index = -1
        self._kind = ""  # of the open block
        self._reasoning: list[str] = []
        self.called = False

    def push(self, events: Iterable[Event]) -> Iterator[dict[str, Any]]:
        for event in events:
            match event:
                case Content(text):
                    yield from self._open("text", {"citations": None, "text": ""})
                    yield self._delta({"type": "text_delta", "text": text})
                case Reasoning(text):
                    yield from self._open("thinking", {"thinking": "", "signature": ""})
                    self._reasoning.append(text)
                    if not self._omitted:
                        yield self._delta({"type": "thinking_delta", "thinking": text})
                case CallStart(_, name, id):
                    self.called = True
                    yield from self.close()
                    call = {"id": tool_id(id, self._reading), "name": name, "input": {}, "caller": {"type": "direct"}}
                    yield from self._open("tool_use", call)
                case Arguments(_, text):
                    yield self._delta({"type": "input_json_delta", "partial_json": text})
                case CallEnd():
                    yield from self.close()

    def close(self) -> Iterator[dict[str, Any]]:
        """Closes the open block, if any."""
        if not self._kind:
            return
        if self._kind == "thinking":
            text = "".join(self._reasoning)
            yield self._delta({"type": "signature_delta", "signature": signature(text, self._omitted)})
            self._reasoning = []
        self._kind = ""
        yield {"type": "content_block_stop", "index": self._index}

    def _open(self, kind: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._kind == kind:
            return
        yield from self.close()
        self._kind, self._index = kind, self._index + 1
        yield {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **fields}}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def content(events: Iterable[Event], reading: Reading | None, omitted: bool = False) -> list[dict[str, Any]]:
    """The blocks of a complete choice: the sum of a stream's events."""
    blocks, found = Blocks(reading, omitted), []
    for event in (*blocks.push(events), *blocks.close()):
        if event["type"] == "content_block_start":
            found.append(event["content_block"])
            arguments: list[str] = []
        elif event["type"] == "content_block_stop":
            if found[-1]["type"] == "tool_use":
                found[-1]["input"] = input_of("".join(arguments))
        else:
            match event["delta"]:
                case {"type": "input_json_delta", "partial_json": text}:
                    arguments.append(text)
                case {"type": _, **piece}:
                    name, text = next(iter(piece.items()))
                    found[-1][name] += text
    return found


def input_of(arguments: str) -> Any:
    """A call's input from the JSON text of its arguments: unchanged, or the valid part of it if the call was cut
    off."""
    try:
        if isinstance(msgspec.json.decode(arguments), dict):
            return msgspec.Raw(arguments.encode())
    except (msgspec.MsgspecError, RecursionError):
        pass
    try:
        value = from_json(arguments, allow_partial=True)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}


def tool_id(own: str | None, reading: Reading | None) -> str:
    return call_id(own, reading.format.calls.id_size if reading else 0, prefix="toolu_")
