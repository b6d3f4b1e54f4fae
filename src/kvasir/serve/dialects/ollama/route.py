"""Helpers shared by the routes of this dialect: names of models, streams of lines."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvasir.errors import InvalidRequest, ModelFileError, ModelNotFound, UnsupportedModel
from kvasir.serve.dialects.ollama.errors import ollama_error
from kvasir.serve.hosting.catalogue import Catalogue, catalogue_of, serving_of
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.faults import Fault
from kvasir.serve.http.sse import LINES, EventStream, Numbering

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer.", "content": {"application/json": {}, "application/x-ndjson": {}}}
}


async def full_name(catalogue: Catalogue, name: str) -> str:
    """The catalogue's name for a name with or without the tag `latest`. Raises ModelNotFound."""
    for spelling in (name.removesuffix(":latest"), f"{name}:latest"):
        with suppress(ModelNotFound):
            return (await catalogue.card(spelling)).name
    return (await catalogue.card(name)).name


async def serving_named(request: Request, name: str, keep_alive: float | None = None) -> Serving:
    """As `serving_of`, for the names of this dialect."""
    try:
        return await serving_of(request, name, keep_alive)
    except ModelNotFound:
        return await serving_of(request, await full_name(catalogue_of(request), name), keep_alive)


def line(content: dict[str, Any]) -> bytes:
    return msgspec.json.encode(content) + b"\n"


def stream_lines(
    ping: float, events: AsyncGenerator[bytes], alive: dict[str, Any], numbering: Numbering | None = None
) -> EventStream:
    """alive: the line that is sent after a silence of `ping` seconds; clients parse every line."""
    how = {"to_response": _error_response, "to_event": _error_line, "headers": LINES, "alive": line(alive)}
    return EventStream(events, **how, ping=ping, numbering=numbering)


def _error_response(fault: Fault) -> Response:
    return Response(ollama_error(fault), fault.status, fault.headers, "application/json")


def _error_line(fault: Fault) -> bytes:
    return ollama_error(fault) + b"\n"


@contextmanager
def faults_of_files() -> Iterator[None]:
    """Turns errors in a requested model's files into InvalidRequest."""
    try:
        yield
    except (ModelFileError, UnsupportedModel) as error:
        raise InvalidRequest(error.message, error.hint, "model") from error
