"""serve: runs the application on a socket, from the start to the end of the engines."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from kvasir import __version__
from kvasir.errors import ConfigError
from kvasir.serve.app import create_app
from kvasir.serve.hosting.catalogue import Catalogue
from kvasir.serve.http.asgi import settle
from kvasir.serve.http.connections import Connections, descriptors
from kvasir.serve.http.drain import DrainGate
from kvasir.serve.http.protocol import bounded_protocol
from kvasir.serve.settings import ServeSettings
from kvasir.serve.telemetry.metrics import HttpMeter
from kvasir.serve.upkeep import Upkeep
from kvasir.serve.watch import FileWatch

log = logging.getLogger("kvasir.serve")

UNREAD = 16  # a refused client may still send UNREAD times the bound on a body
NAMED = 4  # models in the line that is printed at the start
GRACE = 5  # seconds for requests to end after their engine has ended, and again for connections to close


@dataclass(frozen=True, slots=True)
class Opening:
    """What is printed when a server has started. line: what it serves at which address. decisions: of its engines,
    a line each."""

    line: str
    decisions: tuple[str, ...]


Announce = Callable[[Opening], None]


def print_line(opening: Opening) -> None:
    print(opening.line, flush=True)


def run(catalogue: Catalogue, announce: Announce = print_line) -> None:
    """Starts the engines, announces the address, serves until SIGTERM or SIGINT, and ends both. Blocks; must run in the
    main thread.

    Raises KvasirError if the engine cannot start or the address is taken.
    """
    run_in_loop(serve(catalogue, announce))


def run_in_loop(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` in an event loop of the kind that servers use."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(work)


def _loop_factory():
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def serve(catalogue: Catalogue, announce: Announce = print_line) -> None:
    """As `run`, within a running event loop. The address is bound first, so a taken one is reported before a model
    loads."""
    with bind(catalogue.settings) as listener:
        server = Server(catalogue)  # reports unusable files early, too
        await catalogue.start()
        try:
            announce(await opening(catalogue, listener.getsockname()[1]))
            await server.serve(sockets=[listener])
        finally:
            await catalogue.stop()


def bind(settings: ServeSettings) -> socket.socket:
    """A bound socket. Raises ConfigError for an address that is taken or not local."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            settings.host or None, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        hint = "stop the process that uses it, or choose another --port" if taken else "choose another --host or --port"
        raise ConfigError(f"{settings.host}, port {settings.port}: {error.strerror}", hint) from error
    return listener


class Server(uvicorn.Server):
    """uvicorn with a shutdown in three phases: new requests are refused and running ones continue for `drain` seconds;
    then the engines end, which gives each remaining stream an error event; then the connections close."""

    def __init__(self, catalogue: Catalogue, wrap: Callable[[FastAPI], ASGIApp] = lambda app: app):
        """wrap: adds an outermost layer to the application."""
        settings = catalogue.settings
        app = self.app = create_app(catalogue)
        super().__init__(
            uvicorn.Config(
                wrap(app),
                http=bounded_protocol(
                    app.state.connections,
                    settings.max_headers,
                    settings.head_time,
                    settings.write_time,
                    UNREAD * settings.max_body,
                    app.state.http_meter.stall,
                ),
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=int(settings.keep_alive),
                timeout_graceful_shutdown=GRACE,
            )
        )
        self._gate: DrainGate = app.state.drain_gate
        self._connections: Connections = app.state.connections
        self._connections.most = descriptors(settings.max_connections)
        meter: HttpMeter = app.state.http_meter
        watches = []
        if tls := settings.tls:
            self.config.load()
            self.config.ssl = tls.context()
            watches.append(FileWatch("tls", tls.files, self.renew_tls, meter.reloads))
        self._upkeep = Upkeep(app, settings, watches)
        self._listeners: list[socket.socket] = []
        self.servers: list[asyncio.Server] = []
        self._catalogue = catalogue
        self._drain = settings.drain

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        async with self._upkeep.running():
            await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's own; for TLS with a bound on the duration of a handshake."""
        if self.config.ssl is None:
            return await super().startup(sockets)
        self._listeners = sockets or []
        context = None
        while context is not self.config.ssl:  # the context may be renewed in between
            context = self.config.ssl
            await self._listen(context)
        self.started = True

    async def _listen(self, context: ssl.SSLContext) -> None:
        """Accepts connections with this context from now on. The listening sockets are shared, so no connection is lost
        in the switch."""
        state = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        loop = asyncio.get_running_loop()
        create = functools.partial(
            loop.create_server,
            functools.partial(self.config.http_protocol_class, **state),  # type: ignore[arg-type]
            ssl=context,
            backlog=self.config.backlog,
            ssl_handshake_timeout=self._catalogue.settings.head_time,
        )
        servers = [await create(sock=sock.dup()) for sock in self._listeners]
        before, self.servers = self.servers, servers
        # asyncio hands a connection to its server in a later callback, and drops it if the server has closed by then.
        for sock in (sock for server in before for sock in server.sockets):
            with contextlib.suppress(RuntimeError):  # of uvloop, which does not need this
                loop.remove_reader(sock.fileno())
        for _ in range(2):
            await asyncio.sleep(0)
        for server in before:
            server.close()

    async def renew_tls(self) -> None:
        """Replaces the context, since one in use cannot forget an authority, nor the sessions that clients may resume.
        If an authority was removed, all connections close after their responses. Raises ConfigError."""
        tls = self._catalogue.settings.tls
        assert tls is not None, "only its files are watched"
        context, before = await asyncio.to_thread(tls.context), self.config.ssl
        if self.started and not self.should_exit:
            await self._listen(context)
        self.config.ssl = context
        if before and set(before.get_ca_certs(True)) - set(context.get_ca_certs(True)):
            self._close_old()
            late = self._catalogue.settings.head_time + 1  # for handshakes that were in progress
            asyncio.get_running_loop().call_later(late, self._close_old)

    def _close_old(self) -> None:
        """Closes connections of earlier contexts."""
        for connection in list(self.server_state.connections):
            if connection.transport.get_extra_info("sslcontext") is not self.config.ssl:
                connection.shutdown()

    def hang_up(self) -> None:
        self._upkeep.hang_up()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ends the server but, unlike uvicorn's own, not the process: the caller still has to end the engine. A second
        signal skips all waiting."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gate.close()
        await self._upkeep.end_batches()
        tasks = [asyncio.ensure_future(phase) for phase in (self._empty(), self._force())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await settle(*tasks)
        await super().shutdown(sockets)

    async def _empty(self) -> None:
        """Returns when all requests have their responses, or when the time for the rest has passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain):
                return await self._gate.empty()
        log.warning("requests are still running after %g seconds; aborting them", self._drain)
        await self._catalogue.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE):
                await self._gate.empty()

    async def _force(self) -> None:
        while not self.force_exit:
            await asyncio.sleep(0.05)


async def opening(catalogue: Catalogue, port: int) -> Opening:
    settings = catalogue.settings
    names = [card.name for card in await catalogue.cards()]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    scheme, count = "https" if settings.tls else "http", len(settings.all_keys)
    keys = {0: "no key needed", 1: "one API key"}.get(count, f"{count} API keys")
    line = f"Kvasir {__version__} serves {_listed(names)} at {scheme}://{host}:{port}/v1 ({keys})"
    return Opening(line, tuple(line for serving in catalogue.loaded() for line in serving.front.summary()))


def _listed(names: list[str]) -> str:
    if len(names) <= NAMED:
        return ", ".join(names) or "no model yet"
    return f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more models"
