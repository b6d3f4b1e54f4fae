"""Scopes of keys: routes tagged `management` require that scope, all other routes that compute require `inference`.

Reading (GET, HEAD) is open to every key. Without keys the server belongs to one machine, and only direct requests from
that machine may manage it.
"""

from __future__ import annotations

from collections.abc import Iterable

from fastapi.routing import APIRoute
from starlette.requests import HTTPConnection
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from kvasir.serve.auth.guards import LOOKS, origin_name
from kvasir.serve.auth.keys import Key, KeyScope
from kvasir.serve.http.asgi import header, refuse
from kvasir.serve.http.faults import ScopeNeeded, fault_of
from kvasir.serve.http.networks import is_loopback

MANAGEMENT = "management"  # the tag
MANAGES = "manages"  # in the state of a request whose route required the scope itself
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip")


def needs_management(connection: HTTPConnection) -> None:
    """Raises ScopeNeeded unless the client may manage the server. For routes that manage only in some cases; the others
    have the tag."""
    connection.scope["state"][MANAGES] = True
    _check_management(connection.scope)


def may_manage(connection: HTTPConnection) -> bool:
    """Whether `needs_management` would pass; records nothing."""
    try:
        _check_management(connection.scope)
    except ScopeNeeded:
        return False
    return True


def needs_trust(connection: HTTPConnection) -> None:
    """Raises ScopeNeeded unless the client may write control tokens into a conversation."""
    _check_owner(connection.scope, KeyScope.SPECIAL_TOKENS, "set trust_special_tokens")


def _check_management(scope: Scope) -> None:
    _check_owner(scope, KeyScope.MANAGEMENT, "manage the server")


def _check_owner(scope: Scope, needed: KeyScope, what: str) -> None:
    """Passes a key that has the scope; without keys, only requests from this machine itself."""
    key: Key | None = scope.get("state", {}).get("key")
    if key is not None:
        return _check(key, needed)
    origin = header(scope, b"origin")
    from_here = is_loopback((scope.get("client") or ("",))[0]) and not any(header(scope, h) for h in _FORWARDED)
    if not from_here or (origin is not None and not is_loopback(origin_name(origin) or "")):
        raise ScopeNeeded(
            f"without API keys only clients on this machine may {what}", "start the server with --keys FILE"
        )


def _check(key: Key, needed: KeyScope) -> None:
    if needed not in key.scopes:
        raise ScopeNeeded(f"this needs a key with the scope {needed.value!r}", "scopes are set in the --keys file")


class Managing:
    """Finds the management route that a request would use."""

    def __init__(self, routes: Iterable[BaseRoute]):
        self.routes = [r for r in routes if isinstance(r, APIRoute) and MANAGEMENT in r.tags]

    def route(self, scope: Scope) -> str | None:
        """The path pattern of that route, None if the request manages nothing."""
        fits = (r for r in self.routes if scope["method"] in r.methods and r.path_regex.match(scope["path"]))
        return next((r.path for r in fits), None)


class ScopeGuard:
    """403 for a key without the scope that a request requires, before its body is read."""

    def __init__(self, app: ASGIApp, managing: Managing):
        self.app = app
        self.managing = managing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ScopeNeeded as error:
                return await refuse(fault_of(error), scope, receive, send)
        await self.app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        if self.managing.route(scope) is not None:
            return _check_management(scope)
        key: Key | None = scope.get("state", {}).get("key")
        if key is not None and scope["method"] not in LOOKS:
            _check(key, KeyScope.INFERENCE)
