"""Bounds on connections: on all, on those of each address, with places reserved for monitoring and managing the server.

A connection beyond a bound is narrow: it must send its request soon, and gets only the routes that monitor or manage
the server. There are few narrow places, and a new connection takes the place of the oldest silent one, so idle
connections never lock out a health check.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from kvasir.serve.http.asgi import refuse
from kvasir.serve.http.drain import STILL_OPEN
from kvasir.serve.http.faults import Fault
from kvasir.serve.http.networks import Network, forwarded, party, trusted

log = logging.getLogger("kvasir.serve")

NARROW = 64  # narrow places in addition to the bound on all connections
SPARE = 128  # file descriptors for everything else
NARROW_HERE = 8  # narrow places of one address
NARROW_TIME = 2.0  # seconds for the head of a request on a narrow connection
QUIET = 60.0  # minimum seconds between two log lines


class Managing(Protocol):
    """See auth.scopes."""

    def route(self, scope: Scope) -> str | None: ...


class Connection(Protocol):
    @property
    def waits(self) -> bool:
        """Whether no request of it is being served."""
        ...

    def drop(self) -> None: ...


class Connections:
    """The connections of one server, used on one event loop. Counts per party its connections, and the open requests
    that trusted proxies forward for it."""

    def __init__(
        self, most: int, most_here: int, proxies: tuple[Network, ...], clock: Callable[[], float] = time.monotonic
    ):
        self.most = most
        self.most_here = most_here
        self.proxies = proxies
        self._wide: dict[Connection, str] = {}
        self._narrow: dict[Connection, str] = {}  # oldest first
        self._here: Counter[str] = Counter()
        self._clock = clock
        self._refused: Counter[str] = Counter()
        self._warned_at = -QUIET

    def open(self, connection: Connection, address: str | None) -> str | None:
        """None for a connection that may use all routes; otherwise why it is narrow, or "full" if it must close at
        once. Each opened connection must be closed with `close`."""
        proxy = address is not None and trusted(address, self.proxies)
        source = "" if proxy else party(address)
        if len(self._wide) >= self.most:
            return self._squeeze(connection, source, "the server")
        if source and self._here[source] >= self.most_here:
            return self._squeeze(connection, source, "this address")
        self._wide[connection] = source
        self._count(source, 1)
        return None

    def close(self, connection: Connection) -> None:
        self._narrow.pop(connection, None)
        source = self._wide.pop(connection, None)
        if source is not None:
            self._count(source, -1)

    def enter(self, source: str) -> bool:
        """Whether a forwarded request of this party may be served; if so, `leave` must be called after it."""
        if self._here[source] >= self.most_here:
            self.refused("this address")
            return False
        self._count(source, 1)
        return True

    def leave(self, source: str) -> None:
        self._count(source, -1)

    def _count(self, source: str, one: int) -> None:
        self._here[source] += one
        if not self._here[source]:
            del self._here[source]

    def _squeeze(self, connection: Connection, source: str, whose: str) -> str:
        self.refused(whose)
        here = [c for c, party in self._narrow.items() if party == source]
        crowded = here if len(here) >= NARROW_HERE else [*self._narrow] if len(self._narrow) >= NARROW else []
        if crowded:
            silent = next((c for c in crowded if c.waits), None)
            if silent is None:
                return "full"
            del self._narrow[silent]
            silent.drop()
        self._narrow[connection] = source
        return whose

    def refused(self, whose: str) -> None:
        """Logs at once, and then at most one line every QUIET seconds."""
        self._refused[whose] += 1
        now = self._clock()
        if now - self._warned_at >= QUIET:
            counts = " and ".join(f"{count} over the limit of {whose}" for whose, count in self._refused.items())
            log.warning("too many connections: %s; %d are open", counts, len(self._wide))
            self._refused.clear()
            self._warned_at = now


def descriptors(most: int) -> int:
    """How many of `most` connections this process has file descriptors for. Raises the soft limit as far as needed and
    as the hard limit permits."""
    needed = most + NARROW + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    possible = most if soft == resource.RLIM_INFINITY else max(1, min(most, soft - NARROW - SPARE))
    if possible < most:
        log.warning("at most %d connections instead of %d: the limit of open files is %d", possible, most, soft)
    return possible


class ConnectionGuard:
    """429 or 503 on narrow connections, and for clients that have too many requests open through a trusted proxy. The
    client of a request that a trusted proxy forwards is the one that the proxy names."""

    def __init__(self, app: ASGIApp, connections: Connections, managing: Managing):
        self.app = app
        self.connections = connections
        self.managing = managing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        whose = scope.setdefault("state", {}).pop("narrow", None)
        spared = scope["path"] in STILL_OPEN or self.managing.route(scope) is not None
        if whose and not spared:
            return await refuse(_fault(whose), scope, receive, send)
        client = forwarded(scope, self.connections.proxies)
        if client is None:
            return await self.app(scope, receive, send)
        scope["client"] = (client, 0)
        source = party(client)
        if spared:
            return await self.app(scope, receive, send)
        if not self.connections.enter(source):
            return await refuse(_fault("this address"), scope, receive, send)
        try:
            await self.app(scope, receive, send)
        finally:
            self.connections.leave(source)


def _fault(whose: str) -> Fault:
    status = 429 if whose == "this address" else 503
    message = f"{whose} has too many connections open; close some, or try again later"
    return Fault(status, message, "too_many_connections", headers={"Retry-After": "5"})
