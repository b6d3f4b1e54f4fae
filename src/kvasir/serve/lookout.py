"""Lookout: what an engine looks like inside, for however many who look."""

from __future__ import annotations

import asyncio
import time

from kvasir.engine.front import Front
from kvasir.errors import EngineDead
from kvasir.snapshot import Snapshot

FRESH = 0.25  # seconds for which a snapshot is shown to all who ask
ENGINE_SECONDS = 10.0  # for which one is waited for: an engine answers between its steps


class Lookout:
    """Asks the engine for snapshots, one at a time and few a second, however many look."""

    def __init__(self, front: Front):
        self._front = front
        self._asked: asyncio.Task[Snapshot] | None = None
        self._time = 0.0

    async def look(self) -> Snapshot:
        """A snapshot of just now. Raises EngineDead."""
        if self._asked is None or (self._asked.done() and time.monotonic() - self._time >= FRESH):
            self._asked = asyncio.ensure_future(self._ask())
            self._asked.add_done_callback(lambda task: task.cancelled() or task.exception())  # no one may wait
        return await asyncio.shield(self._asked)

    async def _ask(self) -> Snapshot:
        try:
            return await asyncio.wait_for(self._front.look(), ENGINE_SECONDS)
        except TimeoutError:
            raise EngineDead("the engine does not answer", "it is in a long step, or hung") from None
        finally:
            self._time = time.monotonic()
