"""CacheFan: several followers of one engine's prefix cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvasir.engine.client import Engine, ShowsCache
from kvasir.kv.changes import CacheChanges

PAUSE = 0.5  # seconds between two snapshots


class CacheFan:
    """Passes an engine's snapshots and changes on to all followers. Each new follower causes a snapshot for all, a few
    per second at most. An engine that does not show its cache is never asked."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._followers: set[Callable[[CacheChanges], None]] = set()
        self._due: asyncio.TimerHandle | None = None
        self._last = 0.0

    def follow(self, take: Callable[[CacheChanges], None]) -> None:
        """Begins with a snapshot; asking again gives another."""
        self._followers.add(take)
        if self._due is None:
            loop = asyncio.get_running_loop()
            self._due = loop.call_at(max(loop.time(), self._last + PAUSE), self._ask)

    def leave(self, take: Callable[[CacheChanges], None]) -> None:
        """Ends a follower, if it is one."""
        self._followers.discard(take)

    def _ask(self) -> None:
        self._due, self._last = None, asyncio.get_running_loop().time()
        if self._followers and isinstance(self._engine, ShowsCache) and self._engine.state.status == "ok":
            self._engine.follow_cache(self._take)

    def _take(self, changes: CacheChanges) -> None:
        for take in list(self._followers):
            take(changes)
