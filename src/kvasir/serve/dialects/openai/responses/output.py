"""Output: the items of a choice as they are generated, and their stream events.

Responses that are not streamed use the same path; their events are discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import msgspec

from kvasir.engine.answer import TextDelta, TokenInfo
from kvasir.engine.reading import Reading
from kvasir.parse.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning
from kvasir.serve.conversation.calls import call_id
from kvasir.serve.conversation.custom import CustomText
from kvasir.serve.conversation.logprobs import chat_logprobs
from kvasir.serve.dialects.openai.responses.items import CALLS, PREFIXES, sealed
from kvasir.serve.records.responses import Kept

StreamEvent = dict[str, Any]


class Output:
    """items: the complete ones, and the open one. The text of an item is joined when it is closed."""

    def __init__(
        self,
        new_id: Callable[[str, int], str],
        reading: Reading | None,
        logprobs: bool,
        encrypted: bool,
        custom: Collection[str] = (),
    ):
        """new_id: returns the id of an item with this prefix and index. encrypted: reasoning items also carry
        encrypted_content. custom: the names of the custom tools."""
        self.items: list[Kept] = []
        self._new_id = new_id
        self._id_size = reading.format.calls.id_size if reading else 0
        self._logprobs = logprobs
        self._encrypted = encrypted
        self._custom = custom
        self._custom_text = CustomText()  # of the open call
        self._open = False
        self._pieces: list[str] = []  # of the open item
        self._item_tokens: list[TokenInfo] = []  # its tokens, if log-probabilities were requested
        self._tokens: list[TokenInfo] = []  # not settled yet
        self._num_settled = 0

    def push(self, delta: TextDelta) -> Iterator[StreamEvent]:
        self._tokens += delta.logprobs
        for event, settled in zip(delta.events, delta.settled, strict=True):
            tokens = self._tokens[: settled - self._num_settled]
            del self._tokens[: len(tokens)]
            self._num_settled = settled
            yield from self._read(event, tokens)

    def finish(self, status: str) -> Iterator[StreamEvent]:
        """Closes the open item. A complete choice has a message, even if it is empty. status: of the last item."""
        if not self.items and status == "completed":
            yield from self._begin("message")
        if self._open:
            yield from self._close(status)

    def _read(self, event: Event, tokens: list[TokenInfo]) -> Iterator[StreamEvent]:
        match event:
            case Content(text):
                yield from self._begin("message")
                yield self._delta("response.output_text.delta", text, logprobs=self._infos(tokens))
                self._item_tokens += tokens
            case Reasoning(text):
                yield from self._begin("reasoning")
                yield self._delta("response.reasoning_text.delta", text)
            case CallStart(_, name, id):
                kind = "custom_tool_call" if name in self._custom else "function_call"
                yield from self._begin(kind, name=name, call_id=call_id(id, self._id_size))
            case Arguments(_, text):
                yield from self._arguments(text)
            case CallEnd():
                yield from self._close()

    def _arguments(self, text: str) -> Iterator[StreamEvent]:
        if self.items[-1]["type"] == "function_call":
            yield self._delta("response.function_call_arguments.delta", text)
        elif input := self._custom_text.feed(text):
            yield self._delta("response.custom_tool_call_input.delta", input)

    def _infos(self, tokens: Sequence[TokenInfo]) -> list[dict[str, Any]]:
        return chat_logprobs(tokens)["content"] if self._logprobs else []

    def _begin(self, kind: str, **call: str) -> Iterator[StreamEvent]:
        """Continues the open item, if it is of this kind and not a call; otherwise opens a new one."""
        if self._open:
            if self.items[-1]["type"] == kind not in CALLS:
                return
            yield from self._close()
        item: Kept = {"id": self._new_id(PREFIXES[kind], len(self.items)), "type": kind, "status": "in_progress"}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            item |= {**call, "arguments" if kind == "function_call" else "input": ""}
            self._custom_text = CustomText()
        self.items.append(item)
        self._open = True
        yield self._event("response.output_item.added", item=dict(item))
        if kind not in CALLS:
            yield self._event("response.content_part.added", content_index=0, part=self._part(""))

    def _delta(self, type: str, text: str, **more: Any) -> StreamEvent:
        self._pieces.append(text)
        place = {} if self.items[-1]["type"] in CALLS else {"content_index": 0}
        return self._event(type, **place, delta=text, **more)

    def _part(self, text: str) -> dict[str, Any]:
        if self.items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._infos(self._item_tokens)}

    def _close(self, status: str = "completed") -> Iterator[StreamEvent]:
        """Closes the open item. A call's status depends on its arguments: those of a call that was cut off are not
        valid JSON."""
        item = self.items[-1]
        if item["type"] == "custom_tool_call" and (rest := self._custom_text.rest()):
            yield self._delta("response.custom_tool_call_input.delta", rest)
        text = "".join(self._pieces)
        if item["type"] == "custom_tool_call":
            item["input"] = text
            status = "completed" if _is_json(self._custom_text.arguments) else "incomplete"
            yield self._event("response.custom_tool_call_input.done", input=text)
        elif item["type"] == "function_call":
            item["arguments"] = text
            status = "completed" if _is_json(text) else "incomplete"
            yield self._event("response.function_call_arguments.done", name=item["name"], arguments=text)
        else:
            part = self._part(text)
            item["content"] = [part]
            logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            yield self._event(f"response.{kind}.done", content_index=0, text=text, **logprobs)
            yield self._event("response.content_part.done", content_index=0, part=part)
            if item["type"] == "reasoning" and self._encrypted:
                item["encrypted_content"] = sealed(text)
        item["status"] = status
        self._open = False
        self._pieces, self._item_tokens = [], []
        yield self._event("response.output_item.done", item=dict(item))

    def _event(self, type: str, **fields: Any) -> StreamEvent:
        """An event. Its item_id is the open item's, unless the event contains the item itself."""
        own = {} if "item" in fields else {"item_id": self.items[-1]["id"]}
        return {"type": type, "output_index": len(self.items) - 1, **own, **fields}


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True
