"""HEAD and POST /api/blobs/{digest}: files uploaded for creating a model. They are written as they arrive, and kept if
they match their digest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.serve.auth.scopes import MANAGEMENT
from kvasir.serve.dialects.ollama.manage import store_of
from kvasir.serve.hosting.catalogue import catalogue_of
from kvasir.serve.http.asgi import ClientGone
from kvasir.serve.http.body import JsonRoute

router = APIRouter(route_class=JsonRoute)

_PIECE = 4 << 20  # bytes per write
_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/octet-stream": {}}}}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "It is there.", "content": {}},
    201: {"description": "It is there now.", "content": {}},
}


@router.head("/api/blobs/{digest}", tags=["ollama", MANAGEMENT], responses={200: _RESPONSES[200]})
async def has_blob(digest: str, request: HTTPRequest) -> Response:
    found = await asyncio.to_thread(store_of(request).has_blob, digest)
    return Response(status_code=200 if found else 404)


@router.post("/api/blobs/{digest}", tags=["ollama", MANAGEMENT], responses=_RESPONSES, openapi_extra=_BODY)
async def take_blob(digest: str, request: HTTPRequest) -> Response:
    store = store_of(request)
    patience = catalogue_of(request).settings.body_time
    async with aclosing(_pieces(request, patience)) as pieces:
        if await asyncio.to_thread(store.has_blob, digest):
            async for _ in pieces:  # read it all: a client that is interrupted might miss the success
                pass
            return Response(status_code=200)
        with await asyncio.to_thread(store.receive, digest) as writer:
            async for piece in pieces:
                await asyncio.to_thread(writer.write, piece)
            await asyncio.to_thread(writer.keep)
    return Response(status_code=201)


async def _pieces(request: HTTPRequest, patience: float) -> AsyncGenerator[bytes]:
    """The body in pieces. patience: maximum seconds between two messages of the body. Raises ClientGone,
    HTTPException."""
    piece = bytearray()
    more = True
    while more:
        try:
            message = await asyncio.wait_for(request.receive(), patience)
        except TimeoutError:
            raise HTTPException(408, f"no more of the body arrived for {patience:g} seconds") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece += message.get("body", b"")
        more = message.get("more_body", False)
        if piece and (len(piece) >= _PIECE or not more):
            yield bytes(piece)
            piece.clear()
