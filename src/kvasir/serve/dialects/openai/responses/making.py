"""Making: one response in progress, from a validated request to its stored record."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from starlette.requests import Request as HTTPRequest

from kvasir.engine.front import Front
from kvasir.engine.reading import Reading
from kvasir.errors import EngineDead, LimitExceeded, TemplateTooLong, TextTooLong
from kvasir.serve.auth.keys import owner_of
from kvasir.serve.conversation.outcome import check_finish
from kvasir.serve.conversation.request import prompt_ids
from kvasir.serve.conversation.trust import trust_of
from kvasir.serve.dialects.openai.responses.output import Output, StreamEvent
from kvasir.serve.dialects.openai.responses.request import (
    check,
    check_items,
    named,
    own_items,
    to_conversation,
    to_core,
)
from kvasir.serve.dialects.openai.responses.shapes import error_object, response_object, usage_object
from kvasir.serve.dialects.openai.responses.wire import ENCRYPTED, LOGPROBS, CompactRequest, ResponseRequest
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.faults import Fault
from kvasir.serve.records.responses import RUNNING, Kept, Responses, item_id
from kvasir.serve.records.store import new_id
from kvasir.types import FinishReason, Request

log = logging.getLogger("kvasir.serve")


class Making:
    """response: the current response object; its output is set at the end."""

    def __init__(
        self,
        wire: ResponseRequest,
        core: Request,
        reading: Reading | None,
        input: Sequence[Kept],
        model: str,
        owner: str,
    ):
        self.core = core
        self.owner = owner
        self.response = response_object(wire, core, model, int(time.time()))
        self._reading = reading
        self._input = list(input)
        include = wire.include or ()
        custom = frozenset(tool.name for tool in wire.tools or () if tool.type == "custom")
        self._output = Output(self._item_id, reading, LOGPROBS in include, ENCRYPTED in include, custom)
        self._count = 0

    def _item_id(self, prefix: str, index: int) -> str:
        return item_id(prefix, self.core.id, len(self._input) + index)

    # -- events ------------------------------------------------------------------------------------------------

    async def run(self, front: Front) -> AsyncGenerator[list[StreamEvent]]:
        """The events between the first and the last. Raises as `Front.stream`, AnswerFailed, DeadlineExceeded."""
        self.response["status"] = "in_progress"
        async with aclosing(front.stream(self.core, self._reading)) as deltas:
            async for delta in deltas:
                self.response["usage"] = usage_object(delta.usage)
                check_finish(delta, self.core.id)
                events = list(self._output.push(delta))
                if delta.finish_reason is not None:
                    whole = delta.finish_reason is not FinishReason.LENGTH
                    events += self._output.finish("completed" if whole else "incomplete")
                    self._end("completed" if whole else "incomplete")
                yield [self._numbered(event) for event in events]
        if self.response["status"] == "in_progress":
            raise EngineDead("the engine ended the request without output")

    def status_event(self, status: str) -> StreamEvent:
        """An event with the current response object."""
        return self._numbered({"type": f"response.{status}", "response": dict(self.response)})

    def last(self) -> StreamEvent:
        """The final event. The API has no event for a cancelled response, so that is an error event."""
        status = self.response["status"]
        if status == "cancelled":
            error = {"code": "cancelled", "message": "the response was cancelled", "param": None}
            return self._numbered({"type": "error", **error})
        return self.status_event(status)

    def _numbered(self, event: StreamEvent) -> StreamEvent:
        self._count += 1
        return event | {"sequence_number": self._count - 1}

    # -- ends --------------------------------------------------------------------------------------------------

    def _end(self, status: str) -> None:
        self.response |= {"status": status, "output": self._output.items}
        if status == "completed":
            self.response["completed_at"] = int(time.time())
        elif status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}

    def fail(self, fault: Fault) -> list[StreamEvent]:
        """Ends with an error; output generated so far is kept."""
        events = self._break_off("failed")
        if self.response["status"] == "failed":
            self.response["error"] = error_object(fault)
        return events

    def cancel(self) -> list[StreamEvent]:
        return self._break_off("cancelled")

    def _break_off(self, status: str) -> list[StreamEvent]:
        """Ends the response early. A response that has ended already is unchanged."""
        if self.response["status"] not in RUNNING:
            return []
        events = [self._numbered(event) for event in self._output.finish("incomplete")]
        self._end(status)
        return events

    async def keep(self, responses: Responses) -> None:
        """Stores the response if requested. If it cannot be stored, its field `store` becomes false."""
        if self.response["store"]:
            try:
                await self.store(responses)
            except (LimitExceeded, OSError) as error:
                log.warning("response %s cannot be stored: %s", self.core.id, error)
                self.response["store"] = False

    async def store(self, responses: Responses) -> None:
        """Stores the response and its input. Raises LimitExceeded, OSError."""
        await responses.put(self.owner, {"response": self.response, "input": self._input})


async def begin(wire: ResponseRequest, serving: Serving, request: HTTPRequest, responses: Responses) -> Making:
    """Validates a request and prepares its response. Raises InvalidRequest, NotFound, TemplateError,
    ClassNotAllowed."""
    check(wire)
    owner, id = owner_of(request), new_id("resp")
    earlier = await responses.history(owner, wire.previous_response_id)
    own = await own_items(wire, id, owner, responses)
    check_items(earlier, own)
    with named():
        items = [*earlier, *own]
        dropped = await surplus(wire, items, serving, request) if wire.truncation == "auto" else 0
        core, reading = await to_core(wire, await to_conversation(wire, items[dropped:], serving), serving, request)
    making = Making(wire, replace(core, id=id), reading, own, serving.names[0], owner)
    if wire.truncation == "auto":
        making.response["dropped_items"] = dropped
    return making


async def surplus(
    wire: ResponseRequest | CompactRequest, items: Sequence[Kept], serving: Serving, request: HTTPRequest
) -> int:
    """How many leading items must be dropped so that the rest fits into the context: the smallest number after which it
    begins with a message that is not the model's. The last such message is kept, even if it does not fit."""
    room = serving.front.info.max_model_len - max(1, wire.max_output_tokens or 1)
    cuts = [i for i, item in enumerate(items) if item["type"] == "message" and item["role"] != "assistant"]
    cuts = [0, *(i for i in cuts if i)]
    low, high = 0, len(cuts) - 1
    trust = trust_of(wire, serving, request)
    while low < high:
        middle = (low + high) // 2
        try:
            conversation = await to_conversation(wire, items[cuts[middle] :], serving)
            fits = len(await prompt_ids(conversation, serving, trust)) <= room
        except (TextTooLong, TemplateTooLong):
            fits = False
        low, high = (low, middle) if fits else (middle + 1, high)
    return cuts[low]
