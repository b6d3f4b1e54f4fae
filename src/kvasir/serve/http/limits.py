"""Bounds that are checked before parsing: headers, body bytes, the time a body may take, and the depth of its JSON."""

from __future__ import annotations

import asyncio
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvasir.serve.http.asgi import header, refuse
from kvasir.serve.http.faults import Fault

MAX_HEADERS = 128
UPLOADS = ("/api/blobs/", "/v1/files")  # prefixes of routes that stream their bodies, with bounds of their own
MAX_CONTAINERS = 200_000  # arrays and objects in a body
MAX_STRINGS = 500_000
_STRING = re.compile(rb'"[^"]*"')
_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class HeaderLimit:
    """431 for too many headers or header bytes, 414 for a long URL."""

    def __init__(self, app: ASGIApp, max_bytes: int):
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = scope["headers"]
            if len(headers) > MAX_HEADERS or sum(len(k) + len(v) for k, v in headers) > self.max_bytes:
                fault = Fault(431, f"more than {MAX_HEADERS} headers or {self.max_bytes} bytes of them", "too_large")
                return await refuse(fault, scope, receive, send)
            if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > self.max_bytes:
                return await refuse(Fault(414, "the URL is too long", "too_large"), scope, receive, send)
        await self.app(scope, receive, send)


class BodyLimit:
    """Reads the body of a request within bounds, before anything parses it: 413, 408, or 400 for deep nesting."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_seconds: float, max_depth: int):
        self.app = app
        self.max_bytes = max_bytes
        self.max_seconds = max_seconds
        self.max_depth = max_depth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return await self.app(scope, receive, send)
        if scope["path"].startswith(UPLOADS):
            return await self.app(scope, receive, send)
        body = await self._read(scope, receive)
        if body is None:
            return
        if isinstance(body, Fault):
            return await refuse(body, scope, receive, send)
        await self.app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | Fault | None:
        """The body, the fault in it, or None if the client disconnected."""
        too_large = Fault(413, f"the body is larger than {self.max_bytes} bytes", "too_large")
        declared = header(scope, b"content-length") or "0"
        if not declared.isdigit() or int(declared[:20]) > self.max_bytes:
            return too_large
        try:
            async with asyncio.timeout(self.max_seconds):
                body = bytearray()
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > self.max_bytes:
                        return too_large
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            return Fault(408, f"the body did not arrive within {self.max_seconds:g} seconds", "timeout")
        excess = json_excess(bytes(body), self.max_depth)
        return Fault(400, f"the JSON body: {excess}", "invalid_json") if excess else bytes(body)


def json_excess(body: bytes, max_depth: int) -> str | None:
    """What exceeds the bounds in a JSON text, or None: nesting depth, number of arrays and objects, number of strings.

    Removes escapes and then strings, then everything but brackets; each round removes the innermost level. All of it
    runs at the speed of C, the rounds on at most a few hundred thousand brackets.
    """
    if body.count(b"[") + body.count(b"{") <= max_depth:
        return None
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') > 2 * MAX_STRINGS:
        return f"more than {MAX_STRINGS} strings"
    brackets = _STRING.sub(b"", plain).translate(None, _NO_BRACKETS).translate(_TO_SQUARE)
    if len(brackets) > 2 * MAX_CONTAINERS:
        return f"more than {MAX_CONTAINERS} arrays and objects"
    for _ in range(max_depth):
        brackets = brackets.replace(b"[]", b"")
    return f"nested deeper than {max_depth}, or unbalanced brackets" if brackets else None


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body first, and then passes on the server's messages (that the client
    disconnected)."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
