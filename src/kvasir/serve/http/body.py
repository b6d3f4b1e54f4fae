"""Strict JSON bodies: UTF-8, no NaN, no lone surrogates; a malformed body is a 400.

A body is parsed as JSON whatever its Content-Type is: `curl -d` declares a form. (This does not open the server to
pages of other sites: their Origin is refused earlier.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from kvasir.errors import quoted

JSON = "application/json"


class JsonRequest(Request):
    """kind: the Content-Type that the client sent."""

    kind = ""

    async def json(self) -> Any:
        try:
            return msgspec.json.decode(await self.body())
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            # The only error that FastAPI reports as a malformed body, with its message.
            raise json.JSONDecodeError(f"{error}{self._hint()}", "", 0) from error

    def _hint(self) -> str:
        if self.kind.lower().partition(";")[0].strip() == JSON:
            return ""
        given = f"is {quoted(self.kind)}" if self.kind else "is missing"
        return f" (the header Content-Type {given}; send JSON with {JSON})"


class JsonRoute(APIRoute):
    """A route that reads its body as a JsonRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            read = JsonRequest(_json_scope(request.scope), request.receive)
            read.kind = request.headers.get("content-type", "")
            return await handler(read)

        return strict


def _json_scope(scope: Scope) -> Scope:
    others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", JSON.encode())]}
