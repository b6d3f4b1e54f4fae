"""Draining a server: once the gate is closed, it refuses new requests and waits for those in flight."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from kvasir.serve.http.asgi import refuse
from kvasir.serve.http.faults import Fault

STILL_OPEN = frozenset(("/health", "/v1/health", "/metrics"))  # the routes of monitoring


class DrainGate:
    """Counts the requests in flight. Not thread-safe: use it on one event loop."""

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
        """Counts work that continues after its request got its response."""
        self.enter()
        work.add_done_callback(lambda _: self.leave())

    async def empty(self) -> None:
        """Returns once nothing is in flight."""
        await self._empty.wait()


class DrainGuard:
    """503 once the gate is closed, also for the next request of an open connection."""

    def __init__(self, app: ASGIApp, gate: DrainGate):
        self.app = app
        self.gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in STILL_OPEN:
            return await self.app(scope, receive, send)
        if self.gate.closed:
            fault = Fault(503, "the server is shutting down", "shutting_down", headers={"Retry-After": "1"})
            return await refuse(fault, scope, receive, send)
        self.gate.enter()
        try:
            await self.app(scope, receive, send)
        finally:
            self.gate.leave()
