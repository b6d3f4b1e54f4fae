"""An API worker: a server of one model whose engine, limits, adapters and records are the main process's."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

from kvasir.engine.front import Front
from kvasir.memory import host_memory
from kvasir.serve.conversation.output_memory import SHARE
from kvasir.serve.hosting.catalogue import OneModel
from kvasir.serve.http.asgi import settle
from kvasir.serve.server import Server, run_in_loop
from kvasir.serve.settings import ServeSettings
from kvasir.serve.telemetry.reports import WorkerReport
from kvasir.serve.workers import messages
from kvasir.serve.workers.main_link import MainLink, SharedQuotas, SharedShelf
from kvasir.serve.workers.relay import Relay
from kvasir.serve.workers.spec import WorkerSpec

RETRY_SECONDS = 0.02


def shared(settings: ServeSettings, count: int) -> ServeSettings:
    """The settings of one of `count` workers, which together have the bounds of the server. What is stored is the
    main process's."""
    audit = settings.audit_log or (settings.data_dir and settings.data_dir / "audit.jsonl")
    memory = host_memory()[0] // SHARE if settings.answer_memory is None else settings.answer_memory
    connections = -(-settings.max_connections // count)
    return replace(settings, data_dir=None, audit_log=audit, answer_memory=memory // count, max_connections=connections)


def end_with_main() -> None:
    """Starts a thread that ends this process when standard input ends."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True, name="kvasir-main-watch").start()


def run(front: Front, spec: WorkerSpec) -> None:
    """Serves until SIGTERM or the end of the main process. front: over `spec.remote_engine()`."""
    run_in_loop(_serve(front, spec))


async def _serve(front: Front, spec: WorkerSpec) -> None:
    link = MainLink(spec.number)
    front.adapters = SharedShelf(front.engine, link)
    settings = shared(spec.settings, spec.count)
    catalogue = OneModel(
        front, settings, entry=spec.entry, quotas=SharedQuotas(settings.all_keys, link, settings.routers)
    )
    [serving] = catalogue.loaded()
    serving.created = spec.created
    server = Server(catalogue, lambda app: Relay(app, Path(spec.main)))
    while True:  # the main process listens as soon as it has an engine
        try:
            await link.connect(Path(spec.main))
            break
        except OSError:
            await asyncio.sleep(RETRY_SECONDS)
    linked = asyncio.ensure_future(link.run())
    await catalogue.start()
    link.report = lambda: WorkerReport.of(server.app.state.http_meter, {serving.names[0]: front.meter})
    link.abort = server.app.state.open_requests.abort
    announcing = asyncio.ensure_future(_announce(server, link))
    try:
        with socket.socket(fileno=spec.listener) as listener:
            await server.serve(sockets=[listener])
    finally:
        if (report := link.report()) is not None:
            link.send(messages.Alive(report))
        await catalogue.stop()
        await link.close()
        await settle(announcing, linked)


async def _announce(server: Server, link: MainLink) -> None:
    """Tells the main process when the worker serves."""
    while not server.started:
        await asyncio.sleep(RETRY_SECONDS)
    link.send(messages.Serving())
