"""Events read from a choice in the formats of the chat API: content, reasoning_content, tool_calls, function_call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from kvasir.engine.reading import Reading
from kvasir.parse.events import Arguments, CallEnd, CallStart, Content, Event, ParsedMessage, Reasoning
from kvasir.serve.conversation.calls import call_id
from kvasir.serve.conversation.custom import custom_input
from kvasir.types import FinishReason

ReasoningText = Literal["apart", "in the content", "left out"]


@dataclass(frozen=True)
class MessageStyle:
    """How a request wants messages. reasoning: where its text is. legacy: one call, in `function_call`. custom: names
    of the custom tools, whose calls have a text instead of arguments."""

    reading: Reading | None
    reasoning: ReasoningText = "apart"
    legacy: bool = False
    custom: frozenset[str] = frozenset()

    def message(self, message: ParsedMessage) -> dict[str, Any]:
        """The message of a complete choice."""
        text, reasoning = message.content, message.reasoning
        if reasoning and self.reasoning == "in the content":
            start, end = self._marks
            text = f"{start}{reasoning}{end}{text}"
        content = None if message.calls and not text else text
        result: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning and self.reasoning == "apart":
            result["reasoning_content"] = reasoning
        if message.calls and self.legacy:
            call = message.calls[0]
            result["function_call"] = {"name": call.name, "arguments": call.arguments}
        elif message.calls:
            result["tool_calls"] = [self.call(call.id, call.name, call.arguments) for call in message.calls]
        return result

    def call(self, id: str | None, name: str, arguments: str) -> dict[str, Any]:
        """One tool call."""
        size = self.reading.format.calls.id_size if self.reading else 0
        own = call_id(id, size)
        if name in self.custom:
            return {"id": own, "type": "custom", "custom": {"name": name, "input": custom_input(arguments)}}
        return {"id": own, "type": "function", "function": {"name": name, "arguments": arguments}}

    def finish_reason(self, reason: FinishReason | None, called: bool) -> str | None:
        """The finish reason: of a choice with calls that ended by itself, that it calls."""
        if called and reason is FinishReason.STOP:
            return "function_call" if self.legacy else "tool_calls"
        return reason

    @property
    def _marks(self) -> tuple[str, str]:
        thinking = self.reading.format.thinking if self.reading else None
        return (thinking.start, thinking.end) if thinking else ("", "")


@dataclass
class MessageDeltas:
    """The `delta`s of one streamed choice. A custom call is sent as a whole, since its text must be read from JSON."""

    style: MessageStyle
    thinks: bool = False  # reasoning is being written into the content
    held: dict[int, tuple[CallStart, list[str]]] = field(default_factory=dict)  # custom calls

    def of(self, events: Iterable[Event], ended: bool) -> list[dict[str, Any]]:
        """The deltas of some events. ended: of the choice."""
        found = [delta for event in events for delta in self._of(event)]
        return found + (self._end_thinking() if ended else [])

    def _of(self, event: Event) -> list[dict[str, Any]]:
        style = self.style
        match event:
            case Reasoning(text):
                return self._reasoning(text)
            case Content(text):
                return [*self._end_thinking(), {"content": text}]
            case CallStart(index, name, id):
                before = self._end_thinking()
                if name in style.custom:
                    self.held[index] = (event, [])
                    return before
                if style.legacy:
                    return [*before, {"function_call": {"name": name, "arguments": ""}}] if index == 0 else before
                return [*before, {"tool_calls": [{"index": index, **style.call(id, name, "")}]}]
            case Arguments(index, text):
                if index in self.held:
                    self.held[index][1].append(text)
                    return []
                if style.legacy:
                    return [{"function_call": {"arguments": text}}] if index == 0 else []
                return [{"tool_calls": [{"index": index, "function": {"arguments": text}}]}]
            case CallEnd(index):
                return self._custom(index)
        return []

    def _reasoning(self, text: str) -> list[dict[str, Any]]:
        match self.style.reasoning:
            case "apart":
                return [{"reasoning_content": text}]
            case "left out":
                return []
        start = "" if self.thinks else self.style._marks[0]
        self.thinks = True
        return [{"content": start + text}]

    def _end_thinking(self) -> list[dict[str, Any]]:
        if not self.thinks:
            return []
        self.thinks = False
        return [{"content": self.style._marks[1]}]

    def _custom(self, index: int) -> list[dict[str, Any]]:
        if index not in self.held:
            return []
        start, pieces = self.held.pop(index)
        return [{"tool_calls": [{"index": index, **self.style.call(start.id, start.name, "".join(pieces))}]}]
