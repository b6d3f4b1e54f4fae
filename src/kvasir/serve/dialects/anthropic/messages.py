"""POST /v1/messages and /v1/messages/count_tokens

https://platform.claude.com/docs/en/api/messages

The body becomes a chat (prompt.py), and the events read from the choice become content blocks (blocks.py).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.engine.answer import TextDelta
from kvasir.engine.reading import Reading
from kvasir.parse.events import Event
from kvasir.serve.conversation.drafting import speculation_of
from kvasir.serve.conversation.event_ids import EventIds, with_event_ids
from kvasir.serve.conversation.limits import charge
from kvasir.serve.conversation.outcome import check_finish
from kvasir.serve.conversation.request import prompt_ids, to_request
from kvasir.serve.conversation.sampling import asked_fields, sampling_params
from kvasir.serve.conversation.scheduling import scheduling_fields
from kvasir.serve.conversation.trust import trust_of
from kvasir.serve.dialects.anthropic.blocks import Blocks, content
from kvasir.serve.dialects.anthropic.errors import anthropic_error
from kvasir.serve.dialects.anthropic.prompt import omits, to_conversation
from kvasir.serve.dialects.anthropic.wire import CountRequest, MessagesRequest
from kvasir.serve.hosting.catalogue import serving_of
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.asgi import while_connected
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.faults import Fault
from kvasir.serve.http.responses import json_response
from kvasir.serve.http.sse import STREAMED, EventStream
from kvasir.serve.http.wire import renamed
from kvasir.types import FinishReason, Request, ServiceClass, Usage

router = APIRouter(route_class=JsonRoute)
_PREFIX = "msg_"

TIERS = {ServiceClass.INTERACTIVE: "standard", ServiceClass.BATCH: "batch", ServiceClass.BACKGROUND: "batch"}

# Our fields -> fields of this API.
_NAMES = {
    "response_format": "output_config.format",
    "structured_outputs": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
}


@router.post("/v1/messages", tags=["anthropic"], responses=STREAMED)
async def messages(wire: MessagesRequest, request: HTTPRequest) -> Response:
    serving = await serving_of(request, wire.model)
    job = await to_job(wire, serving, request)
    [core], ids = with_event_ids(request, serving, [job.core], stream=bool(wire.stream), prefix=_PREFIX)
    job = replace(job, core=core)
    await charge(serving, [core], request, whole=not wire.stream)
    if not wire.stream:
        return json_response(await while_connected(request.receive, job.response()))
    id = request.scope["state"].get("request_id")

    def response(fault: Fault) -> Response:
        return Response(anthropic_error(fault, id), fault.status, fault.headers, "application/json")

    def failure(fault: Fault) -> bytes:
        return b"event: error\ndata: " + anthropic_error(fault, id) + b"\n\n"

    alive = event({"type": "ping"})
    how = {"to_response": response, "to_event": failure, "ping": serving.settings.ping, "alive": alive}
    return EventStream(job.events(ids), **how, numbering=ids)


@router.post("/v1/messages/count_tokens", tags=["anthropic"])
async def count_tokens(wire: CountRequest, request: HTTPRequest) -> Response:
    serving = await serving_of(request, wire.model)
    with renamed(_NAMES):
        conversation, _ = await asyncio.to_thread(to_conversation, wire, serving)
        ids = await prompt_ids(conversation, serving, trust_of(wire, serving, request), "count")
    return json_response({"input_tokens": len(ids)})


# -- to_job ------------------------------------------------------------------------------------------------


async def to_job(wire: MessagesRequest, serving: Serving, request: HTTPRequest) -> MessageJob:
    """The job of a request. Raises InvalidRequest for unsupported requests."""
    with renamed(_NAMES):
        conversation, fields = await asyncio.to_thread(to_conversation, wire, serving)
        ids = await prompt_ids(conversation, serving, trust_of(wire, serving, request))
        params = sampling_params(_asked(wire) | fields, serving.front.info, serving.own, max_tokens=1)
        scheduling = scheduling_fields(wire, serving, request) | speculation_of(wire)
        core, reading = await to_request(conversation, ids, params, serving, fields=scheduling)
    room = serving.front.info.max_model_len - len(core.prompt_ids)
    params = replace(core.params, max_tokens=min(room, wire.max_tokens or 1))
    core = replace(core, id=_PREFIX + secrets.token_hex(12), params=params)
    return MessageJob(wire, serving, core, reading)


def _asked(wire: MessagesRequest) -> dict[str, Any]:
    found = asked_fields(wire, "anthropic")
    return found if wire.stop_sequences is None else found | {"stop": tuple(wire.stop_sequences)}


# -- the response ------------------------------------------------------------------------------------------


def event(data: dict[str, Any]) -> bytes:
    return b"event: " + data["type"].encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


@dataclass(slots=True)
class MessageJob:
    """One HTTP request, and how its response is encoded."""

    wire: MessagesRequest
    serving: Serving
    core: Request
    reading: Reading | None

    @property
    def only_prompt(self) -> bool:
        """Whether no token was requested. One is sampled anyway, since the engine computes a prompt only to sample."""
        return self.wire.max_tokens == 0

    async def response(self) -> dict[str, Any]:
        read: list[Event] = []
        last = TextDelta(0)
        async with aclosing(self.serving.front.stream(self.core, self.reading)) as deltas:
            async for last in deltas:
                check_finish(last, self.core.id)
                read += self._shown(last)
        whole = content(read, self.reading, omits(self.wire))
        called = any(block["type"] == "tool_use" for block in whole)
        return {**self._head(last), "content": whole, **self._ending(last, called)}

    async def events(self, ids: EventIds | None = None) -> AsyncGenerator[bytes]:
        blocks = Blocks(self.reading, omits(self.wire))
        first = True
        stream = self.serving.front.stream(self.core, self.reading, ids and ids.through)
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                check_finish(delta, self.core.id)
                emitted = [{"type": "message_start", "message": self._head(delta)}] if first else []
                first = False
                emitted += blocks.push(self._shown(delta))
                if delta.finish_reason:
                    emitted += blocks.close()
                    ending, usage = self._ending(delta, blocks.called), self._usage(delta.usage)
                    last = {"type": "message_delta", "context_management": self._edits(), "usage": usage}
                    emitted += [{**last, "delta": {"container": None, **ending}}, {"type": "message_stop"}]
                if emitted:
                    yield b"".join(map(event, emitted))

    def _shown(self, delta: TextDelta) -> list[Event]:
        return [] if self.only_prompt else list(delta.events)

    def _head(self, delta: TextDelta) -> dict[str, Any]:
        """The message before its content. seed: reproduces the result."""
        seed = {} if self.core.params.greedy else {"seed": self.core.params.seed}
        return {
            "id": self.core.id,
            "type": "message",
            "role": "assistant",
            "model": self.serving.names[0],
            "content": [],
            "container": None,
            "context_management": self._edits(),
            "stop_reason": None,
            "stop_details": None,
            "stop_sequence": None,
            "usage": {**self._usage(delta.usage), "service_tier": TIERS[self.core.slo]},
            **seed,
        }

    def _ending(self, delta: TextDelta, called: bool) -> dict[str, Any]:
        """The stop fields. A choice whose max_tokens exceeded the context may end at the context's end. Stop strings
        from the store are not reported to the client."""
        ending = {"stop_details": None, "stop_sequence": None}
        if delta.stop_reason in (self.wire.stop_sequences or ()) and not self.only_prompt:
            return ending | {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
        if delta.finish_reason is FinishReason.STOP and not self.only_prompt:
            reason = "tool_use" if called else "end_turn"
        else:
            full = delta.usage.completion_tokens < self.wire.max_tokens
            reason = "model_context_window_exceeded" if full else "max_tokens"
        return ending | {"stop_reason": reason}

    def _edits(self) -> dict[str, Any] | None:
        """The only edits that can be requested have no effect."""
        return None if self.wire.context_management is None else {"applied_edits": []}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """Prompt tokens are counted separately: those found in the cache, and the others."""
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": 0 if self.only_prompt else usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": 0 if self.only_prompt else usage.reasoning_tokens},
        }
