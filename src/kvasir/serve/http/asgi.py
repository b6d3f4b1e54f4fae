"""Helpers shared by all middlewares. All are plain ASGI: nothing buffers between a stream and its socket."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Message, Receive, Scope, Send

from kvasir.serve.http.dialect import response_of
from kvasir.serve.http.faults import Fault

T = TypeVar("T")
LEFT = 499  # the status of a request whose client disconnected before a response started


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of that (lower-case) name."""
    return next((v.decode("latin-1") for k, v in scope["headers"] if k == name), None)


class Sent:
    """A `send` that records what passes through it. status: None until the response has started. whole: the complete
    response was sent."""

    def __init__(self, send: Send):
        self._send = send
        self.status: int | None = None
        self.whole = False

    async def __call__(self, message: Message) -> None:
        self.status = message.get("status", self.status)
        await self._send(message)
        self.whole = message["type"] == "http.response.body" and not message.get("more_body")


async def refuse(fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
    """Responds with the fault at once and closes the connection, since the rest of the request has not been read."""
    response = response_of(fault, scope)
    response.headers["connection"] = "close"
    await response(scope, receive, send)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has disconnected; the body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


class ClientGone(Exception):
    """The client disconnected; there is no reader for the response."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Cancels it and raises ClientGone if the client disconnects first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await settle(task, gone)


async def settle(*tasks: asyncio.Future) -> None:
    """Cancels the tasks and waits until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
