"""Access checks: the Host and Origin of every request are checked, and once a key is configured every route requires
one."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from functools import partial
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from kvasir.engine.turns import ASKER, Asker
from kvasir.errors import quoted
from kvasir.serve.auth.keyring import KeyRing
from kvasir.serve.http.asgi import header, refuse, while_connected
from kvasir.serve.http.faults import Fault
from kvasir.serve.http.networks import is_loopback, is_wildcard

LOOKS = ("GET", "HEAD", "OPTIONS")  # methods that only read


class HostGuard:
    """403 for a Host that is not served here, and for an Origin that is not allowed.

    A page of a hostile site can make a browser resolve the site's own name to this machine (DNS rebinding); such a
    request carries that name as Host. So only names that are known to mean this server are served: loopback names, the
    bound address, the allowed hosts, and, if all addresses are bound, any numeric address.
    """

    def __init__(self, app: ASGIApp, host: str, allowed_hosts: Iterable[str], allowed_origins: Iterable[str]):
        """host: the bound address."""
        self.app = app
        self.any_address = is_wildcard(host)
        self.hosts = {host.lower(), *(h.lower() for h in allowed_hosts)}
        self.origins = {o.lower().rstrip("/") for o in allowed_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = header(scope, b"host")
            if not self._knows(host):
                shown = quoted(host or "")
                fault = Fault(403, f"host {shown} is not allowed (allow it with --allowed-host)", "forbidden_host")
                return await refuse(fault, scope, receive, send)
            origin = header(scope, b"origin")
            if origin is not None and not self.admits(origin, host or ""):
                shown = quoted(origin)
                fault = Fault(
                    403, f"origin {shown} is not allowed (allow it with --allowed-origin)", "forbidden_origin"
                )
                return await refuse(fault, scope, receive, send)
        await self.app(scope, receive, send)

    def _knows(self, host: str | None) -> bool:
        name = _hostname(f"//{host}") if host else None
        if name is None:
            return False
        return "*" in self.hosts or name in self.hosts or is_loopback(name) or (self.any_address and _is_address(name))

    def admits(self, origin: str, host: str) -> bool:
        """Whether a page of `origin` may use the server: its own pages, pages of this machine, and the allowed
        origins."""
        origin = origin.lower().rstrip("/")
        if "*" in self.origins or origin in self.origins:
            return True
        name = origin_name(origin)
        return name is not None and (is_loopback(name) or urlsplit(origin).netloc == host.lower())


def origin_name(origin: str) -> str | None:
    """The host name in an Origin; None if it is not an http or https URL."""
    return _hostname(origin) if origin.lower().startswith(("http://", "https://")) else None


def _hostname(url: str) -> str | None:
    """The host of a URL without port and brackets; None for a malformed URL or one with user, path or query."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises for a port that is no number
    except ValueError:
        return None
    plain = not (parts.path or parts.query or parts.fragment or "@" in parts.netloc)
    return parts.hostname if plain else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class KeyGuard:
    """401 without a valid key, unless an open path is only read. Deny by default: a new route needs a key with no
    further work.

    Sets `state["key"]`: the Key of the request, None where none is required.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing, open_paths: Collection[str]):
        self.app = app
        self.ring = ring
        self.open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # there is no such route, and none may bypass the check
            return await send({"type": "websocket.close", "code": 1008})
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        key = None
        if self.ring and not (scope["path"] in self.open_paths and scope["method"] in LOOKS):
            key = self.ring.find(_given_key(scope))
            if key is None:
                fault = Fault(
                    401,
                    "a valid API key is needed",
                    "invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                return await refuse(fault, scope, receive, send)
        scope.setdefault("state", {})["key"] = key
        ASKER.set(Asker(key.name if key else "", partial(while_connected, receive)))
        await self.app(scope, receive, send)


def _given_key(scope: Scope) -> bytes:
    scheme, _, key = (header(scope, b"authorization") or "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip().encode("latin-1")
    return (header(scope, b"x-api-key") or "").encode("latin-1")
