"""HTTP requests that API workers leave to the main process: those for what exists once. Each goes over a connection of
its own, whose end means that the client has left.

worker                       main process
Head, Body ...          ->
                        <-   Start, Body ...
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvasir.engine.frames import FrameError, FrameSocket, decoded
from kvasir.serve.auth.scopes import Managing
from kvasir.serve.http.asgi import Sent, refuse, settle
from kvasir.serve.http.drain import STILL_OPEN, DrainGate
from kvasir.serve.http.faults import Fault
from kvasir.serve.workers import messages

# What is stored for clients, and what is counted over all workers. So is all that changes the server.
MAIN = re.compile(
    r"/(metrics|kvasir/live|is_sleeping|fleet.*|v1/responses.*|v1/files.*|v1/batches.*|v1/messages/batches.*)"
)
_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "client")


class Relay:
    """ASGI middleware of a worker around everything else."""

    def __init__(self, app: FastAPI, main: Path):
        """main: its socket."""
        self.app = app
        self._main = main
        self._managing = Managing(app.state.routes)
        self._gate: DrainGate = app.state.drain_gate  # counts relayed requests, too

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("app", self.app)
        if scope["type"] != "http" or not self._leaves(scope):
            return await self.app(scope, receive, send)
        counted = scope["path"] not in STILL_OPEN
        if counted:
            self._gate.enter()
        try:
            await self._relay(scope, receive, Sent(send))
        finally:
            if counted:
                self._gate.leave()

    def _leaves(self, scope: Scope) -> bool:
        return bool(MAIN.fullmatch(scope["path"])) or self._managing.route(scope) is not None

    async def _relay(self, scope: Scope, receive: Receive, send: Sent) -> None:
        try:
            link = FrameSocket(*await asyncio.open_unix_connection(self._main))
        except OSError:
            return await _unavailable(scope, receive, send)
        try:
            link.write(messages.encode(_head(scope)))
            sending = asyncio.ensure_future(_send_body(link, receive))
            try:
                await _receive_response(link, send)
            except FrameError:
                if send.status is not None:
                    raise  # the client sees a broken response
                await _unavailable(scope, receive, send)
            finally:
                await settle(sending)
        finally:
            link.abort()


async def _unavailable(scope: Scope, receive: Receive, send: Send) -> None:
    fault = Fault(503, "the server is starting again, or ends", "unavailable", headers={"Retry-After": "1"})
    await refuse(fault, scope, receive, send)


def _head(scope: Scope) -> messages.Head:
    facts: dict[str, Any] = {name: scope.get(name) for name in _SCOPE}
    facts["narrow"] = scope.get("state", {}).get("narrow")
    return messages.Head(facts, [*scope["headers"]])


async def _send_body(link: FrameSocket, receive: Receive) -> None:
    """Sends what the client sends; the connection ends when it has left."""
    while (message := await receive())["type"] == "http.request":
        data, more = message.get("body", b""), bool(message.get("more_body"))
        for start in range(0, max(1, len(data)), messages.CHUNK):
            part = data[start : start + messages.CHUNK]
            link.write(messages.encode(messages.Body(part, more or start + len(part) < len(data))))
            await link.drain()
    link.abort()


async def _receive_response(link: FrameSocket, send: Send) -> None:
    more = True
    while more:
        part = decoded(messages.response_part, await link.read(messages.MAX_FRAME, None))
        if isinstance(part, messages.Start):
            await send({"type": "http.response.start", "status": part.status, "headers": part.headers})
        else:
            more = part.more
            await send({"type": "http.response.body", "body": part.data, "more_body": more})


async def serve_relayed(
    app: ASGIApp, link: FrameSocket, head: messages.Head, synced: Callable[[], Awaitable[None]]
) -> None:
    """Serves a relayed request in the main process. synced: awaited before the response, so that the client finds its
    changes in all workers. Raises OSError."""
    facts = dict(head.scope)
    state = {"narrow": narrow} if (narrow := facts.pop("narrow", None)) else {}
    client = facts.pop("client")
    scope: Scope = {
        **facts,
        "client": tuple(client) if client else None,
        "server": None,
        "headers": head.headers,
        "extensions": {},
        "state": state,
        "asgi": {"version": "3.0"},
    }
    await app(scope, _Incoming(link), _sender(link, synced))


class _Incoming:
    """`receive` of a relayed request."""

    def __init__(self, link: FrameSocket):
        self._link = link
        self._more = True

    async def __call__(self) -> Message:
        try:
            part = decoded(messages.request_part, await self._link.read(messages.MAX_FRAME, None))
        except FrameError:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part.data, "more_body": part.more}


def _sender(link: FrameSocket, synced: Callable[[], Awaitable[None]]) -> Send:
    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            await synced()
            link.write(messages.encode(messages.Start(message["status"], [*message.get("headers", ())])))
            return
        data, more = message.get("body", b""), bool(message.get("more_body"))
        for start in range(0, max(1, len(data)), messages.CHUNK):
            part = data[start : start + messages.CHUNK]
            link.write(messages.encode(messages.Body(part, more or start + len(part) < len(data))))
            try:
                await link.drain()
            except FrameError as error:
                raise OSError(str(error)) from None  # as servers raise it for a client that has left

    return send
