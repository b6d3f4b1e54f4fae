"""Upkeep: what a server does besides serving: batches, records that expire, files that change, logs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from fastapi import FastAPI

from kvasir.serve.auth.keyring import KeyRing
from kvasir.serve.http.asgi import settle
from kvasir.serve.records.batches import Batches
from kvasir.serve.settings import ServeSettings
from kvasir.serve.telemetry.metrics import HttpMeter
from kvasir.serve.watch import FileWatch

log = logging.getLogger("kvasir.serve")

SWEEP = 3600.0  # seconds between two removals of old records


class Upkeep:
    """Of one application, on its event loop."""

    def __init__(
        self,
        app: FastAPI,
        settings: ServeSettings,
        watches: Sequence[FileWatch] = (),
        on_reload: Callable[[], None] = lambda: None,
    ):
        """watches: of further files than that of the keys. on_reload: called by `reload`."""
        meter: HttpMeter = app.state.http_meter
        self._batches: Batches = app.state.batches
        self._on_reload = on_reload
        self._kept = (app.state.responses, app.state.batches)
        self._logs = meter.logs.values()
        self._watches = [*watches]
        if settings.keys_file:
            ring: KeyRing = app.state.ring
            self._watches.append(FileWatch("keys", [settings.keys_file], ring.reload, meter.reloads))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Does all of it as long as the context lasts, and then writes the last log lines and unlocks the records."""
        await self._batches.start()
        work = [asyncio.ensure_future(work) for work in (*(watch.run() for watch in self._watches), self._sweep())]
        try:
            with self._reloading():
                yield
        finally:
            await settle(*work)
            await asyncio.gather(*(asyncio.to_thread(lines.close) for lines in self._logs))
            for kept in self._kept:
                kept.close()

    async def end_batches(self) -> None:
        """Stops the batches; a later server continues them."""
        await self._batches.stop()

    async def _sweep(self) -> None:
        """Removes expired records, once at the start and then periodically."""
        while True:
            for kept in self._kept:
                try:
                    await kept.sweep()
                except Exception:
                    log.exception("expired records could not be removed")
            await asyncio.sleep(SWEEP)

    @contextlib.contextmanager
    def _reloading(self) -> Iterator[None]:
        """Makes SIGHUP reopen all files; it ends a server that has none, as by default."""
        if not self.has_files or threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    @property
    def has_files(self) -> bool:
        """Whether there is something to reload."""
        return bool(self._watches or self._logs)

    def reload(self) -> None:
        """Reads all files again, and opens the logs anew."""
        self._on_reload()
        for watch in self._watches:
            watch.ask()
        for lines in self._logs:
            lines.reopen()
