"""serve: the application on a socket, from the engine's start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from types import FrameType

import uvicorn

from kvasir import __version__
from kvasir.serve.app import create_app
from kvasir.serve.catalogue import Catalogue
from kvasir.serve.protocol import bounded_protocol
from kvasir.serve.settings import ServeSettings

log = logging.getLogger("kvasir.serve")

GRACE = 5  # seconds between the engine's end and the end of connections that still do not close


def run(catalogue: Catalogue) -> None:
    """Starts the engines, serves until SIGTERM or SIGINT, and ends both. Blocks; the main thread is wanted.

    Raises KvasirError when the engine cannot start, OSError when the address is taken.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve(catalogue))


def _loop_factory():
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def serve(catalogue: Catalogue) -> None:
    """The same within a running event loop. The address is bound first: a taken one is known before a model
    loads."""
    with bind(catalogue.settings) as listener:
        await catalogue.start()
        server = Server(catalogue)
        try:
            print(summary(catalogue, listener.getsockname()[1]), flush=True)
            await server.serve(sockets=[listener])
        finally:
            await catalogue.stop()


def bind(settings: ServeSettings) -> socket.socket:
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
    return listener


class Server(uvicorn.Server):
    """uvicorn, ending in three steps: no new connections; running answers for `drain` seconds; then the
    engine's end gives each stream that is left an honest error, and the connections close."""

    def __init__(self, catalogue: Catalogue):
        settings = catalogue.settings
        super().__init__(
            uvicorn.Config(
                create_app(catalogue),
                http=bounded_protocol(settings.max_headers, settings.head_time, settings.write_time),
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                limit_concurrency=settings.max_connections,
                timeout_keep_alive=int(settings.keep_alive),
                timeout_graceful_shutdown=int(settings.drain) + GRACE,
            )
        )
        self._catalogue = catalogue
        self._drain = settings.drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ends the server and, unlike uvicorn's own, leaves it to the caller to end the process: the engine
        comes after. A second SIGINT waits for nothing."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        end = asyncio.ensure_future(self._end_engine())
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await end

    async def _end_engine(self) -> None:
        await asyncio.sleep(self._drain)
        log.warning("requests are still running after %g seconds and are ended", self._drain)
        await self._catalogue.stop()


def summary(catalogue: Catalogue, port: int) -> str:
    """What was started and what the engines decided, for people."""
    settings, loaded = catalogue.settings, catalogue.loaded()
    names = [card.name for card in catalogue.cards()]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    keys = {0: "no key needed (loopback only)", 1: "one API key"}.get(len(settings.all_keys))
    return "\n".join(
        (
            f"Kvasir {__version__} serves {', '.join(names) or 'no model yet'}",
            *(f"  {line}" for serving in loaded for line in serving.front.engine.summary),
            f"  address   http://{host}:{port}/v1  ({keys or f'{len(settings.all_keys)} API keys'})",
        )
    )
