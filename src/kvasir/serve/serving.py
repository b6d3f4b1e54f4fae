"""Serving: the front half, the settings, and the helpers that every route needs."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir import __version__
from kvasir.engine.answer import Answer, TextDelta
from kvasir.engine.front import Front
from kvasir.errors import DeadlineExceeded, InvalidRequest
from kvasir.serve import access
from kvasir.serve.faults import AnswerFailed, ClassNotAllowed, Fault, log
from kvasir.serve.keys import Key
from kvasir.serve.lookout import Lookout
from kvasir.serve.quota import Quotas
from kvasir.serve.scopes import needs_trust
from kvasir.serve.settings import ServeSettings
from kvasir.serve.sse import EventStream
from kvasir.serve.wire import Scheduling, Trust
from kvasir.store.entry import Entry
from kvasir.store.parameters import sampling_of
from kvasir.types import FinishReason, Request, ServiceClass

CLASS_HEADER = "x-kvasir-class"


class Serving:
    """One model of a server: its front half, with the settings applied. Routes get it from `catalogue.serving_of`.
    entry: the model's entry in the store, None if it is not from there."""

    def __init__(self, front: Front, settings: ServeSettings, quotas: Quotas, entry: Entry | None = None):
        self.front = front
        self.entry = entry
        self.settings = settings
        self.quotas = quotas
        self.lookout = Lookout(front)
        self.created = int(time.time())
        front.on_tokens = quotas.answer
        front.meter.on_end = lambda watch: access.note(self.names[0], watch)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model; responses carry the first."""
        if self.settings.model_names or self.entry is None:
            return self.settings.model_names or (self.front.info.name,)
        return tuple(dict.fromkeys((self.entry.name, self.entry.name.removesuffix(":latest"))))

    @property
    def own(self) -> dict[str, Any]:
        """Defaults of SamplingParams from the model's store entry, which requests may override."""
        return sampling_of(self.entry.parameters) if self.entry else {}

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The messages of a chat, preceded by those of the model's store entry."""
        return self.entry.conversation(messages) if self.entry else messages

    @property
    def fingerprint(self) -> str:
        """Changes when results may change: with the version, the model or the way it is computed."""
        info = self.front.info
        facts = (__version__, info.name, info.dtype, info.device, info.executor, info.grade, info.numerics)
        return "fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:10]

    async def ids_of(self, prompt: str | list[int], add_special_tokens: bool | None, param: str) -> Sequence[int]:
        """The ids of a prompt. A text gets special tokens unless that is declined; ids are returned unchanged."""
        if not isinstance(prompt, str):
            return prompt
        special = add_special_tokens is not False
        return await self.front.encode(prompt, add_special_tokens=special, param=param)

    def fields(self, request: HTTPRequest, wire: Scheduling, tier: ServiceClass | None = None) -> dict[str, Any]:
        """The fields of an engine request besides prompt and parameters: tenant, class and scheduling.

        tier: the class that a dialect's own field stands for. Raises InvalidRequest, ClassNotAllowed.
        """
        key: Key | None = request.scope["state"].get("key")
        return {
            "slo": service_class(wire.service_class, tier, request.headers.get(CLASS_HEADER), key),
            "priority": wire.priority or 0,
            "tenant": key.name if key else "",
            "weight": key.weight if key else 1.0,
            "deadline": wire.deadline,
            "cache_salt": self._namespace(key, wire.cache_salt),
            "no_cache": bool(wire.no_cache),
            "cache_ttl": wire.cache_ttl,
        }

    def trust(self, request: HTTPRequest, wire: Trust) -> bool | None:
        """Whether texts of this conversation may be control tokens; None: the server's default. Raises ScopeNeeded."""
        if wire.trust_special_tokens and not self.front.trust_special_tokens:
            needs_trust(request)
        return wire.trust_special_tokens

    def _namespace(self, key: Key | None, salt: str | None) -> str | None:
        """The prefix cache's namespace: the key's own, divided further by the request's salt."""
        own = key.name if key and not self.settings.share_cache else ""
        return f"{len(own)}:{own}{salt or ''}" if own or salt else None

    def charge(self, requests: Sequence[Request], asked: HTTPRequest, *, whole: bool) -> None:
        """Reserves memory for the choices of one HTTP request, and counts its prompts against its key's limit. whole:
        the choices are buffered until all are complete. Raises InvalidRequest, LimitExceeded."""
        asked.scope["state"]["reservation"].take(requests, whole)
        self.quotas.prompt(requests[0].tenant, sum(len(r.prompt_ids) for r in requests))

    def check_logprobs(self, **asked: int | None) -> None:
        """Raises InvalidRequest for more candidates per token than the server allows."""
        for name, count in asked.items():
            if count is not None and count > self.settings.max_logprobs:
                raise InvalidRequest(f"{name} is {count}", f"at most {self.settings.max_logprobs}", param=name)

    async def write(self, heavy: bool, function: Callable[..., object], *arguments: Any) -> Response:
        """The function's result as a JSON response; computed in a thread if `heavy`."""

        def response() -> Response:
            return json_response(function(*arguments))

        return await asyncio.to_thread(response) if heavy else response()

    def stream(
        self,
        events: AsyncGenerator[bytes],
        to_response: Callable[[Fault], Response],
        to_event: Callable[[Fault], bytes],
    ) -> EventStream:
        ping = self.settings.ping
        return EventStream(events, to_response=to_response, to_event=to_event, ping=ping)


def service_class(field: str | None, tier: ServiceClass | None, header: str | None, key: Key | None) -> ServiceClass:
    """The class of a request: from its field, otherwise its tier, its header, its key. Raises InvalidRequest for a
    header that names no class, ClassNotAllowed for a class above the key's best."""
    try:
        asked = ServiceClass(field) if field else tier or (ServiceClass(header.strip().lower()) if header else None)
    except ValueError:
        names = ", ".join(c.value for c in ServiceClass)
        raise InvalidRequest(f"{CLASS_HEADER} is {header!r:.80}", f"expected one of {names}", CLASS_HEADER) from None
    if key is None:
        return asked or ServiceClass.INTERACTIVE
    if asked and asked.rank < key.limits.max_class.rank:
        best = key.limits.max_class.value
        raise ClassNotAllowed(f"this key may not ask for {asked.value}", f"at best {best}", "service_class")
    return asked or key.slo


def json_response(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def check_finish(answer: TextDelta | Answer, request_id: str) -> None:
    """Raises an error for a choice that did not end by itself: InvalidRequest if the request is the cause, AnswerFailed
    if the engine is (the details are only logged), DeadlineExceeded after a timeout."""
    reason = answer.finish_reason
    if reason is FinishReason.ERROR and answer.refused:
        raise InvalidRequest(answer.error or "the request cannot be followed")
    if reason is FinishReason.ERROR:
        log.error("request %s failed in the engine: %s", request_id, answer.error)
        raise AnswerFailed(f"the engine failed on request {request_id}", "the server's log has the details")
    if reason is FinishReason.TIMEOUT:
        raise DeadlineExceeded("the deadline of the request passed", "what was streamed before stands")
    if reason is FinishReason.ABORT:
        raise AnswerFailed("the request was ended by the server")
