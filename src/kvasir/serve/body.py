"""JSON bodies, read strictly: UTF-8, no NaN, no lone surrogates; what is malformed is a 400."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response


class JsonRequest(Request):
    async def json(self) -> Any:
        try:
            return msgspec.json.decode(await self.body())
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            # The one error that FastAPI reports as a malformed body, with its message.
            raise json.JSONDecodeError(str(error), "", 0) from error


class JsonRoute(APIRoute):
    """A route that reads its body as JsonRequest does."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return strict
