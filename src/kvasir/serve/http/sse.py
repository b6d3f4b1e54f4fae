"""Event streams: they send keep-alives, report errors, and stop when their client disconnects.

Formats: https://html.spec.whatwg.org/multipage/server-sent-events.html, https://github.com/ndjson/ndjson-spec
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kvasir.serve.http.asgi import disconnected, settle
from kvasir.serve.http.faults import Fault, fault_of

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
    ):
        """alive: bytes sent after a silence of `ping` seconds."""
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._events = events
        self._to_response = to_response
        self._to_event = to_event
        self._ping = ping
        self._alive = alive
        self._lock = asyncio.Lock()
        self._started = False
        self._last = 0.0  # when something was last sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(scope, receive, send))
        others = (asyncio.ensure_future(disconnected(receive)), asyncio.ensure_future(self._keep_alive(send)))
        try:
            await asyncio.wait({pump, *others}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()  # raises the error, if any
        finally:
            await settle(pump, *others)
            await self._events.aclose()

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            while True:
                try:
                    data = await anext(events)
                except StopAsyncIteration:
                    break
                except Exception as error:
                    await self._fail(fault_of(error), scope, receive, send)
                    return
                await self._write(send, data)
        await self._write(send, b"", more=False)

    async def _fail(self, fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._lock:
            if not self._started:
                self._started = True
                await self._to_response(fault)(scope, receive, send)
                return
        await self._write(send, self._to_event(fault))
        await self._write(send, b"", more=False)

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
