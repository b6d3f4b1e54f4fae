"""Event streams: they send keep-alives, report errors, and stop when their client disconnects.

Formats: https://html.spec.whatwg.org/multipage/server-sent-events.html, https://github.com/ndjson/ndjson-spec
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kvasir.serve.http.asgi import disconnected, settle
from kvasir.serve.http.faults import Fault, fault_of
from kvasir.server_statistics import HttpStats

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer.", "content": {"application/json": {}, "text/event-stream": {}}}
}

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
LINES = {**HEADERS, "content-type": "application/x-ndjson"}


def event(data: bytes) -> bytes:
    """One event with JSON data, which has no line breaks."""
    return b"data: " + data + b"\n\n"


def _meter_of(scope: Scope) -> HttpStats:
    """That of the application; a new one without an application."""
    return scope["app"].state.http_meter if "app" in scope else HttpStats()


class Numbering(Protocol):
    """Gives the events of a stream ids, from which a client can continue it."""

    def numbered(self, data: bytes) -> bytes:
        """The events as they are sent; b"" if the client has them."""
        ...

    def end(self) -> None:
        """Called when all events were sent. Raises what `fault_of` takes."""
        ...


class EventStream(Response):
    """Sends encoded events as they come.

    The first event decides the status: an error before it becomes an ordinary error response. If the first event takes
    longer than `ping`, the stream starts without it; an error then, as in mid stream, becomes an error event, and the
    stream ends without a completion marker.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        *,
        to_response: Callable[[Fault], Response],
        to_event: Callable[[Fault], bytes],
        ping: float = 15.0,
        headers: Mapping[str, str] = HEADERS,
        alive: bytes = PING,
        numbering: Numbering | None = None,
    ):
        """alive: bytes sent after a silence of `ping` seconds."""
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._events = events
        self._to_response = to_response
        self._to_event = to_event
        self._ping = ping
        self._alive = alive
        self._numbering = numbering
        self._lock = asyncio.Lock()
        self._started = False
        self._last = 0.0  # when something was last sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        meter, kind = _meter_of(scope), "no" if self._numbering is None else "yes"
        meter.streams[kind] += 1
        pump = asyncio.ensure_future(self._pump(scope, receive, send))
        others = (asyncio.ensure_future(disconnected(receive)), asyncio.ensure_future(self._keep_alive(send)))
        try:
            await asyncio.wait({pump, *others}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done() and pump.result():  # raises the error, if any
                meter.broken[kind] += 1
        finally:
            meter.streams[kind] -= 1
            await settle(pump, *others)
            await self._events.aclose()

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Whether the server broke the stream off."""
        try:
            async with aclosing(self._events) as events:
                async for data in events:
                    if self._numbering is not None and not (data := self._numbering.numbered(data)):
                        continue
                    await self._write(send, data)
            if self._numbering is not None:
                self._numbering.end()
        except Exception as error:
            return await self._fail(fault_of(error), scope, receive, send)
        await self._write(send, b"", more=False)
        return False

    async def _fail(self, fault: Fault, scope: Scope, receive: Receive, send: Send) -> bool:
        """Whether the fault broke off a stream that had begun."""
        async with self._lock:
            if not self._started:
                self._started = True
                await self._to_response(fault)(scope, receive, send)
                return False
        await self._write(send, self._to_event(fault))
        await self._write(send, b"", more=False)
        return fault.status >= 500

    async def _write(self, send: Send, data: bytes, more: bool = True) -> None:
        async with self._lock:
            if not self._started:
                self._started = True
                await send(self._head())
            await send({"type": "http.response.body", "body": data, "more_body": more})
            self._last = time.monotonic()

    def _head(self) -> Message:
        return {"type": "http.response.start", "status": 200, "headers": self.raw_headers}

    async def _keep_alive(self, send: Send) -> None:
        """Sends keep-alives during silences."""
        self._last = time.monotonic()
        while True:
            due = self._last + self._ping - time.monotonic()
            await asyncio.sleep(max(due, self._ping / 4))
            if not self._lock.locked() and time.monotonic() - self._last >= self._ping:
                await self._write(send, self._alive)
