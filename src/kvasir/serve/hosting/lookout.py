"""Lookout: snapshots of an engine's state, shared by all viewers."""

from __future__ import annotations

import asyncio
import time

from kvasir.engine.front import Front
from kvasir.errors import EngineDead
from kvasir.snapshot import Snapshot

FRESH = 0.25  # seconds for which a snapshot is reused
ENGINE_SECONDS = 10.0  # timeout of a snapshot: an engine responds between its steps


class Lookout:
    """Asks the engine for snapshots, one at a time and a few per second, however many viewers there are."""

    def __init__(self, front: Front):
        self._front = front
        self._asked: asyncio.Task[Snapshot] | None = None
        self._time = 0.0

    async def look(self) -> Snapshot:
        """A snapshot that is at most FRESH seconds old. Raises EngineDead."""
        if self._asked is None or (self._asked.done() and time.monotonic() - self._time >= FRESH):
            self._asked = asyncio.ensure_future(self._ask())
            self._asked.add_done_callback(lambda task: task.cancelled() or task.exception())  # waiters may be gone
        return await asyncio.shield(self._asked)

    async def _ask(self) -> Snapshot:
        try:
            return await asyncio.wait_for(self._front.look(), ENGINE_SECONDS)
        except TimeoutError:
            raise EngineDead("the engine does not respond", "it is in a long step, or hung") from None
        finally:
            self._time = time.monotonic()
