"""Strict JSON bodies: UTF-8, no NaN, no lone surrogates; a malformed body is a 400.

A body is parsed as JSON whatever its Content-Type is: `curl -d` declares a form. (This does not open the server to
pages of other sites: their Origin is refused earlier.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, cast

import msgspec
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kvasir.errors import bounded, quoted

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


IGNORED = "x-kvasir-ignored-fields"
MAX_ROUNDS = 32  # of finding unknown fields: objects of a union are checked one after the other


class JsonRoute(APIRoute):
    """A route that reads its body as a JsonRequest. Unknown fields are refused, or, with the setting
    `ignore_unknown_fields`, left out and listed in the header X-Kvasir-Ignored-Fields."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            read = JsonRequest(_json_scope(request.scope), request.receive)
            read.kind = request.headers.get("content-type", "")
            try:
                return await handler(read)
            except RequestValidationError as error:
                if not request.app.state.catalogue.settings.ignore_unknown_fields:
                    raise
                return await _without_unknown(handler, read, error)

        return strict


async def _without_unknown(
    handler: Callable[[Request], Coroutine[Any, Any, Response]], read: JsonRequest, error: RequestValidationError
) -> Response:
    """Serves a request without the fields that are not known. Raises RequestValidationError for any other fault."""
    body, ignored = await read.json(), dict[str, None]()
    for _ in range(MAX_ROUNDS):
        found = {path: None for one in error.errors() if (path := _taken_out(body, one))}
        if not found:
            break
        ignored |= found
        read = JsonRequest(read.scope, read.receive)
        read._body = msgspec.json.encode(body)
        try:
            return cast(Response, _WithIgnored(await handler(read), ", ".join(ignored)))
        except RequestValidationError as again:
            error = again
    raise error


def _taken_out(body: Any, error: Mapping[str, Any]) -> str:
    """Takes the field out of a body that an error says is unknown; its path, "" for any other error."""
    if error["type"] != "extra_forbidden":
        return ""
    path, at = [], body
    *inner, name = error["loc"]
    for part in inner:  # some parts name the alternative of a union
        if (isinstance(at, dict) and part in at) or (isinstance(at, list) and isinstance(part, int) and part < len(at)):
            at = at[part]
            path.append(str(part))
    if not isinstance(at, dict) or name not in at:
        return ""
    del at[name]
    return ".".join((*path, str(name)))


class _WithIgnored:
    """A response with a header that lists ignored fields."""

    def __init__(self, response: Response, ignored: str):
        self._response = response
        self._header = (IGNORED.encode(), bounded(ignored).encode("ascii", "backslashreplace"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._response, name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_more(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self._header]}
            await send(message)

        await self._response(scope, receive, send_more)


def _json_scope(scope: Scope) -> Scope:
    others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", JSON.encode())]}
