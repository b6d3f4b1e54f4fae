"""Complete JSON responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response


def json_response(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def write_json(heavy: bool, function: Callable[..., object], *arguments: Any) -> Response:
    """The function's result as a JSON response; computed in a thread if `heavy`."""

    def response() -> Response:
        return json_response(function(*arguments))

    return await asyncio.to_thread(response) if heavy else response()
