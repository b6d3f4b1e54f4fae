"""Upkeep: what a server does besides serving: batches, records that expire, files that change, logs, signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from fastapi import FastAPI

from kvasir.serve.auth.keyring import KeyRing
from kvasir.serve.auth.sharing import SharingQuotas
from kvasir.serve.hosting.catalogue import Catalogue
from kvasir.serve.http.asgi import settle
from kvasir.serve.records.batches import Batches
from kvasir.serve.rolling import RollingRestart
from kvasir.serve.settings import ServeSettings
from kvasir.serve.telemetry.metrics import HttpMeter
from kvasir.serve.telemetry.otlp import SpanExporter
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
        on_signal: Callable[[signal.Signals], None] = lambda kind: None,
    ):
        """watches: of further files than that of the keys. on_signal: called with SIGHUP and SIGUSR1."""
        meter: HttpMeter = app.state.http_meter
        self._batches: Batches = app.state.batches
        catalogue: Catalogue = app.state.catalogue
        self._quotas = catalogue.quotas
        self._engines = lambda: [serving.front.engine for serving in catalogue.loaded()]
        self._on_signal = on_signal
        self._restart = RollingRestart(app.state.catalogue, settings.drain) if settings.replaces_replicas else None
        self._kept = (app.state.responses, app.state.batches)
        self._logs = meter.logs.values()
        self._exporter: SpanExporter | None = app.state.exporter
        self._watches = [*watches]
        if settings.keys_file:
            ring: KeyRing = app.state.ring
            self._watches.append(FileWatch("keys", [settings.keys_file], ring.reload, meter.reloads))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Does all of it as long as the context lasts, and then writes the last log lines and unlocks the records."""
        await self._batches.start()
        restarting = (self._restart.run(),) if self._restart else ()
        sharing = (self._quotas.share(self._engines),) if isinstance(self._quotas, SharingQuotas) else ()
        running = (*(watch.run() for watch in self._watches), self._sweep(), *restarting, *sharing)
        work = [asyncio.ensure_future(one) for one in running]
        try:
            with self._handling_signals():
                yield
        finally:
            await settle(*work)
            ends = [*self._logs, *((self._exporter,) if self._exporter else ())]
            await asyncio.gather(*(asyncio.to_thread(one.close) for one in ends))
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
    def _handling_signals(self) -> Iterator[None]:
        """Handles SIGHUP and SIGUSR1; they end a server that has nothing to do at them, as by default."""
        needed = self._watches or self._logs or self._restart
        if not needed or threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        handlers = {signal.SIGHUP: self.hang_up, signal.SIGUSR1: self.reopen}
        for kind, handler in handlers.items():
            loop.add_signal_handler(kind, handler)
        try:
            yield
        finally:
            for kind in handlers:
                loop.remove_signal_handler(kind)

    def hang_up(self) -> None:
        """Reads all files again, opens the logs anew, and replaces the replicas."""
        self._on_signal(signal.SIGHUP)
        for watch in self._watches:
            watch.ask()
        self._reopen()
        if self._restart:
            self._restart.ask()

    def reopen(self) -> None:
        """Opens the logs anew."""
        self._on_signal(signal.SIGUSR1)
        self._reopen()

    def _reopen(self) -> None:
        for lines in self._logs:
            lines.reopen()
