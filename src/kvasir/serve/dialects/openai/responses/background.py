"""Responses generated in the background: independent of the client's connection, and readable again after a
reconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from kvasir.serve.dialects.openai.responses.making import Making
from kvasir.serve.dialects.openai.responses.output import StreamEvent
from kvasir.serve.dialects.openai.responses.shapes import encoded
from kvasir.serve.hosting.catalogue import Catalogue
from kvasir.serve.http.faults import fault_of
from kvasir.serve.records.responses import Responses


class BackgroundRun:
    """One background response. events: encoded; the index of each is its sequence number. They are kept if
    `streamed`."""

    def __init__(self, making: Making, streamed: bool):
        self.making = making
        self.streamed = streamed
        self.ended = False
        self.leased = asyncio.Event()  # set once the model is leased, or the run has ended
        self._events: list[bytes] = []
        self._more = asyncio.Event()
        self._cancelled = False
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.making.core.id

    @property
    def owner(self) -> str:
        """The name of the key that created it."""
        return self.making.owner

    @property
    def response(self) -> dict[str, Any]:
        """The current response object."""
        return self.making.response

    @property
    def size(self) -> int:
        """Bytes of its events."""
        return sum(map(len, self._events))

    @property
    def status(self) -> str:
        """queued or in_progress, until it has ended."""
        return "in_progress" if self.leased.is_set() else "queued"

    def start(self, catalogue: Catalogue, name: str | None, responses: Responses) -> asyncio.Task[None]:
        self._emit([self.making.status_event("created"), self.making.status_event("queued")])
        self._task = asyncio.ensure_future(self._work(catalogue, name, responses))
        return self._task

    async def cancel(self) -> None:
        """Cancels the response. Returns when it has ended, possibly by itself."""
        assert self._task is not None
        if not self._closing:
            self._cancelled = True
            self._task.cancel()
        await asyncio.wait((self._task,))

    async def follow(self, start: int) -> AsyncGenerator[bytes]:
        """The events from the index `start` on, as they come."""
        while True:
            if len(self._events) > start:
                events, start = self._events[start:], len(self._events)
                yield b"".join(events)
            elif self.ended:
                return
            else:
                self._more.clear()
                await self._more.wait()

    async def _work(self, catalogue: Catalogue, name: str | None, responses: Responses) -> None:
        making = self.making
        try:
            async with catalogue.lease(name, owner=making.owner) as serving:
                self.leased.set()
                self._emit([making.status_event("in_progress")])
                async with aclosing(making.run(serving.front)) as batches:
                    async for events in batches:
                        self._emit(events)
        except asyncio.CancelledError:
            if not self._cancelled:  # the server shuts down; the stored record then reads as failed
                raise
            self._emit(making.cancel())
        except Exception as error:
            self._emit(making.fail(fault_of(error)))
        finally:
            self._closing = True
            self.leased.set()
        await making.keep(responses)
        self._emit([making.last()])
        self.ended = True
        self._more.set()
        responses.remove(self)

    def _emit(self, events: list[StreamEvent]) -> None:
        if self.streamed:
            self._events += map(encoded, events)
            self._more.set()
