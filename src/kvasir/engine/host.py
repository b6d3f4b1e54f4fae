"""EngineHost: serves an engine to clients in other processes or on other machines; RemoteEngine is the client.

Each client has a connection of its own (hosted.py). When it drops, its requests are aborted. Over a Unix socket clients
are processes of this user; over TCP they know the key. The key grants all that the engine can do, as does being the
user who runs it.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import os
import secrets
import ssl
from collections.abc import Callable
from pathlib import Path

from kvasir.engine import remote_wire as wire
from kvasir.engine.board import Board
from kvasir.engine.cache_fan import CacheFan
from kvasir.engine.client import Engine
from kvasir.engine.frames import FrameError, FrameSocket, decoded
from kvasir.engine.hosted import HostedClient
from kvasir.engine.wire import to_fault
from kvasir.errors import ConfigError, InvalidRequest, KvasirError

log = logging.getLogger("kvasir.engine")

MAX_CLIENTS = 256
MAX_STRANGERS = 32  # connections that have not said hello
HELLO_SECONDS = 5.0  # until the first frame, TLS included
MIN_KEY = 16  # characters


class EngineHost:
    """Serves `engine`, which the caller starts and stops, on the loop on which it was started."""

    def __init__(self, engine: Engine, key: str = "", max_clients: int = MAX_CLIENTS):
        """key: of clients over TCP."""
        self.engine = engine
        self._fan = CacheFan(engine)
        self._board = Board()
        self._key = key.encode()
        self._max_clients = max_clients
        self._servers: list[asyncio.Server] = []
        self._clients: set[HostedClient] = set()
        self._strangers = 0
        self._tasks: set[asyncio.Task] = set()
        self._numbers = itertools.count(1)
        self._instance = secrets.token_hex(8)
        self._closing = False

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    async def listen_unix(self, path: Path) -> None:
        """Takes clients on a new socket at this path, in a folder of mode 0700. Raises ConfigError."""
        try:
            server = await asyncio.start_unix_server(self._accept(needs_key=False), path)
            os.chmod(path, 0o600)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}", "choose another path") from None
        self._servers.append(server)

    async def listen_tcp(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Takes clients that know the key; returns the port, which is chosen if it is 0. Raises ConfigError."""
        if len(self._key) < MIN_KEY:
            raise ConfigError("a host on the network needs a key", f"give one of {MIN_KEY} characters or more")
        try:
            more = {"ssl": tls, "ssl_handshake_timeout": HELLO_SECONDS} if tls else {}
            server = await asyncio.start_server(self._accept(needs_key=True), host, port, **more)
        except OSError as error:
            raise ConfigError(f"{host}, port {port}: {error.strerror}", "choose another address") from None
        self._servers.append(server)
        return server.sockets[0].getsockname()[1]

    async def close(self, drain: float = 0.0) -> None:
        """Takes no more clients and requests, lets requests end for up to `drain` seconds, and closes all
        connections."""
        self._closing = True
        for server in self._servers:
            server.close()
        deadline = asyncio.get_running_loop().time() + drain
        for client in self._clients:
            client.refuses = True
        while any(client.num_open for client in self._clients) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        for client in list(self._clients):
            await client.flush()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, needs_key: bool) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._connection(FrameSocket(reader, writer), needs_key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return accept

    async def _connection(self, link: FrameSocket, needs_key: bool) -> None:
        try:
            await self._serve(link, needs_key)
        except FrameError as error:
            log.debug("a client of the engine has left: %s", error)
        except Exception:
            log.exception("a connection of the engine's host failed")
        finally:
            link.abort()

    async def _serve(self, link: FrameSocket, needs_key: bool) -> None:
        if self._closing or self._strangers >= MAX_STRANGERS or not (needs_key or link.is_own_user):
            return
        self._strangers += 1
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                greeting = decoded(wire.hello, await link.read(wire.HELLO_BYTES, None))
            if refusal := self._refusal(greeting, needs_key):
                link.write(wire.encode(wire.Fault(0, 0, to_fault("", refusal))))
                return await link.close()
        except TimeoutError:
            return
        finally:
            self._strangers -= 1
        client = HostedClient(link, self.engine, self._instance, next(self._numbers), self._fan, self._board)
        self._clients.add(client)
        try:
            await client.run()
        finally:
            self._clients.discard(client)

    def _refusal(self, greeting: wire.Hello, needs_key: bool) -> KvasirError | None:
        """Why this client is not served."""
        if needs_key and not hmac.compare_digest(greeting.key.encode(), self._key):
            return ConfigError("the engine's host does not know this key", "give the key that it was started with")
        if greeting.version != wire.VERSION:
            message = f"the engine's host speaks version {wire.VERSION} of its protocol, not {greeting.version}"
            return ConfigError(message, "run the same version of Kvasir on both sides")
        if len(self._clients) >= self._max_clients:
            return InvalidRequest(f"the engine's host has {len(self._clients)} clients", "that is the most it takes")
        return None
