"""PublishingEngine: an engine process whose prefix cache routers of others can follow (kv_events.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvasir.engine.kv_events import KvEvents
from kvasir.engine.subprocess import ProcessEngine
from kvasir.kv.changes import CacheChanges
from kvasir.snapshot import Snapshot
from kvasir.statistics import EngineStats


class PublishingEngine(ProcessEngine):
    """Takes what ProcessEngine takes. events: open while the engine runs. The events are made in this process from what
    the engine reports after its steps, so that no subscriber can delay a step, and their numbers go on when the engine
    is restarted."""

    follows_contents = True

    def __init__(self, *args: Any, events: KvEvents, **more: Any):
        super().__init__(*args, **more)
        self._events = events
        self._before = events.published, events.dropped
        self._other: Callable[[CacheChanges], None] | None = None
        super().follow_cache(self._take)

    def _open(self) -> None:
        try:
            self._events.open()
        except BaseException:
            self._context.term()
            raise

    def launch(self) -> None:
        self._open()
        try:
            super().launch()
        except BaseException:
            self._events.close()
            raise

    def abandon(self) -> None:
        if self._launched:
            self._events.close()
        super().abandon()

    async def start(self) -> None:
        self._open()
        self._events.serve()
        try:
            await super().start()
        except BaseException:
            self._events.close()
            raise

    async def stop(self, drain: float = 0.0) -> None:
        try:
            await super().stop(drain)
        finally:
            self._events.clear()
            self._events.close()

    def follow_cache(self, take: Callable[[CacheChanges], None]) -> None:
        self._other = take
        super().follow_cache(self._take)

    def _take(self, changes: CacheChanges) -> None:
        if not self._events.take(changes):
            super().follow_cache(self._take)
        if self._other:
            self._other(changes)

    async def _bury(self) -> None:
        await super()._bury()
        self._events.clear()

    async def stats(self) -> EngineStats:
        return self._counted(await super().stats())

    async def look(self) -> Snapshot:
        found = await super().look()
        return replace(found, stats=self._counted(found.stats))

    def _counted(self, stats: EngineStats) -> EngineStats:
        published, dropped = self._before
        return replace(
            stats,
            event_batches=self._events.published - published,
            event_batches_dropped=self._events.dropped - dropped,
        )
