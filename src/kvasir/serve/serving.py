"""What every route needs: the front half, the settings, and the few answers that depend on both."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir import __version__
from kvasir.engine.front import Front
from kvasir.errors import InvalidRequest
from kvasir.serve.faults import AnswerFailed, Fault, ModelNotFound, log
from kvasir.serve.settings import ServeSettings
from kvasir.serve.sse import EventStream
from kvasir.types import FinishReason


class Serving:
    """One per application, in `app.state.serving`."""

    def __init__(self, front: Front, settings: ServeSettings):
        self.front = front
        self.settings = settings
        self.created = int(time.time())

    @property
    def names(self) -> tuple[str, ...]:
        """What the model may be called; the first is what answers carry."""
        return self.settings.model_names or (self.front.info.name,)

    @property
    def fingerprint(self) -> str:
        """Changes when answers may change: with the version, the model or the way it is computed."""
        info = self.front.info
        facts = (__version__, info.name, info.dtype, info.device, info.executor, info.grade)
        return "fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:10]

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound for a name that is not served; no name means the model that is."""
        if name is not None and name not in self.names:
            raise ModelNotFound(f"the model {name[:200]!r} does not exist here", f"served: {self.names[0]!r}")

    async def ids_of(self, prompt: str | list[int], add_special_tokens: bool | None, param: str) -> Sequence[int]:
        """The ids of a text or of ids as they are; special tokens are added unless that is declined."""
        if not isinstance(prompt, str):
            return prompt
        special = add_special_tokens is not False
        return await self.front.encode(prompt, add_special_tokens=special, param=param)

    def cache_salt(self, request: HTTPRequest, salt: str | None) -> str | None:
        """The namespace of the prefix cache: the key's own, divided further by the request's salt."""
        parts = [p for p in (request.scope["state"].get("tenant"), salt) if p]
        return "/".join(parts) or None

    def check_logprobs(self, **asked: int | None) -> None:
        """Raises InvalidRequest for more candidates per token than an answer may carry."""
        for name, count in asked.items():
            if count is not None and count > self.settings.max_logprobs:
                raise InvalidRequest(f"{name} is {count}", f"at most {self.settings.max_logprobs}", param=name)

    async def write(self, heavy: bool, function: Callable[..., object], *arguments: Any) -> Response:
        """The JSON of what a function makes; in a thread when there is much of it."""

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


def serving_of(request: HTTPRequest) -> Serving:
    return request.app.state.serving


def json_response(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def check_finish(reason: FinishReason | None, error: str | None, request_id: str) -> None:
    """Raises AnswerFailed for an answer that did not end by itself; the details go to the log alone."""
    if reason is FinishReason.ERROR:
        log.error("request %s failed in the engine: %s", request_id, error)
        raise AnswerFailed(f"the engine failed on request {request_id}", "the server's log has the details")
    if reason is FinishReason.ABORT:
        raise AnswerFailed("the request was ended by the server")
