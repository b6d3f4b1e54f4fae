"""Calls a route of the application from within the server, as its owner would, but without the drain gate."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp, Message, Scope

from kvasir.serve.auth.keys import Key
from kvasir.serve.conversation.output_memory import MemoryGuard
from kvasir.serve.conversation.scheduling import CLASS_HEADER
from kvasir.serve.hosting.catalogue import Leases
from kvasir.serve.http.dialect import response_of
from kvasir.serve.http.faults import fault_of
from kvasir.types import ServiceClass


@dataclass(slots=True)
class CallResult:
    """headers: by lower-case name."""

    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


RETRY_SECONDS = 60.0  # maximum pause before a retry, in seconds


def retry_pause(answer: CallResult) -> float | None:
    """Seconds after which a call that found the server too busy is made again; None for any other answer."""
    if answer.status not in (429, 503) or answer.headers.get("x-should-retry") == "false":
        return None
    pause = RETRY_SECONDS
    with suppress(ValueError):
        pause = float(answer.headers.get("retry-after", "1"))
    return min(max(pause, 0.05), RETRY_SECONDS)


class Caller:
    """Calls the routes of an application. Error handling, leases, memory limits and the key's permissions apply;
    authentication, request limits and checks of the body do not."""

    def __init__(self, app: FastAPI):
        self._app = app
        self._inner: ASGIApp | None = None

    def _stack(self) -> ASGIApp:
        """Built on first use: the application gets its error handlers after its routes."""
        if self._inner is None:
            inside = AsyncExitStackMiddleware(self._app.router)
            leasing = Leases(ExceptionMiddleware(inside, handlers=self._app.exception_handlers))
            self._inner = MemoryGuard(leasing, self._app.state.answer_memory)
        return self._inner

    async def post(self, path: str, body: bytes, key: Key | None, id: str) -> CallResult:
        """id: of the request. Cancelling it cancels the work that it started."""
        scope: Scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "client": None,
            "server": None, "app": self._app, "state": {"key": key, "request_id": id},
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json"),
                        (CLASS_HEADER.encode(), service_class(key).value.encode())],
        }  # fmt: skip
        answer, pieces, given = CallResult(), [], False

        async def receive() -> Message:
            nonlocal given
            if given:
                await asyncio.Event().wait()  # the client never disconnects
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in message["headers"]}
            else:
                pieces.append(message.get("body", b""))

        try:
            await self._stack()(scope, receive, send)
        except Exception as error:
            return CallResult(500, {}, bytes(response_of(fault_of(error), scope | {"app": self._app}).body))
        answer.body = b"".join(pieces)
        return answer


def service_class(key: Key | None) -> ServiceClass:
    """batch, unless the key permits at best background."""
    if key is not None and key.limits.max_class.rank > ServiceClass.BATCH.rank:
        return key.limits.max_class
    return ServiceClass.BATCH
