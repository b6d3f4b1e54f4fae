"""Doors: how a server ends. Once they are closed no request comes in, and those that are inside are waited for."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from kvasir.serve.asgi import refuse
from kvasir.serve.faults import Fault

STILL_OPEN = frozenset(("/health", "/v1/health", "/metrics"))  # what those who watch the server ask


class Doors:
    """All on one event loop."""

    def __init__(self) -> None:
        self.closed = False
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def close(self) -> None:
        self.closed = True

    def enter(self) -> None:
        self._inside += 1
        self._empty.clear()

    def leave(self) -> None:
        self._inside -= 1
        if not self._inside:
            self._empty.set()

    def hold(self, work: asyncio.Task) -> None:
        """Work that continues when its request is answered counts as inside."""
        self.enter()
        work.add_done_callback(lambda _: self.leave())

    async def empty(self) -> None:
        """Returns when no one is inside."""
        await self._empty.wait()


class DoorGuard:
    """503 for what comes after the doors were closed, and for the next request of a connection as well."""

    def __init__(self, app: ASGIApp, doors: Doors):
        self.app = app
        self.doors = doors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in STILL_OPEN:
            return await self.app(scope, receive, send)
        if self.doors.closed:
            fault = Fault(503, "the server is ending", "shutting_down", headers={"Retry-After": "1"})
            return await refuse(fault, scope, receive, send)
        self.doors.enter()
        try:
            await self.app(scope, receive, send)
        finally:
            self.doors.leave()
