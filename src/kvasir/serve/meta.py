"""GET /health, /metrics and /version: about the server itself."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response

from kvasir import __version__
from kvasir.errors import EngineDead
from kvasir.serve.metrics import CONTENT_TYPE, exposition
from kvasir.serve.serving import json_response, serving_of

router = APIRouter(tags=["server"])

ENGINE_SECONDS = 2.0  # for which an answer of the engine is waited for


@router.get("/health")
async def health(request: HTTPRequest) -> Response:
    """200 when the engine's loop answers, else 503."""
    alive = await serving_of(request).front.alive(ENGINE_SECONDS)
    return json_response({"status": "ok" if alive else "engine does not answer"}, 200 if alive else 503)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: HTTPRequest) -> Response:
    """Prometheus text. Without an answer from the engine, what this process knows."""
    serving = serving_of(request)
    try:
        stats = await asyncio.wait_for(serving.front.stats(), ENGINE_SECONDS)
    except (EngineDead, TimeoutError):
        stats = None
    text = exposition(serving.names[0], serving.front.meter, request.app.state.http_meter, stats)
    return Response(text, media_type=CONTENT_TYPE)


@router.get("/version")
async def version() -> Response:
    return json_response({"version": __version__})
