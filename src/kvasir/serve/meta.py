"""GET /health, /metrics and /version: about the server itself."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response

from kvasir import __version__
from kvasir.errors import EngineDead
from kvasir.serve.hosting.catalogue import catalogue_of
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.responses import json_response
from kvasir.serve.telemetry.metrics import CONTENT_TYPE, ModelMetrics, exposition
from kvasir.serve.telemetry.reports import WorkerReport, total_of

router = APIRouter(tags=["server"])

ENGINE_SECONDS = 2.0  # timeout of a query to the engine


@router.head("/health", include_in_schema=False)
@router.get("/health")
@router.get("/v1/health", include_in_schema=False)
async def health(request: HTTPRequest) -> Response:
    """200 if the loop of each engine responds, otherwise 503 with the facts about the first engine that does not: its
    model, the status (starting, restarting, ended, engine does not answer), the reason, the number of restart attempts,
    and the time of the next one (seconds since 1970). Also 503 while the server shuts down."""
    if request.app.state.drain_gate.closed:
        return json_response({"status": "draining"}, 503)
    states = await asyncio.gather(*map(_state, catalogue_of(request).loaded()))
    wrong = [state for state in states if state["status"] != "ok"]
    return json_response(wrong[0] if wrong else {"status": "ok"}, 503 if wrong else 200)


async def _state(serving: Serving) -> dict[str, Any]:
    """The state of an engine for the response, without empty fields."""
    alive, state = await serving.front.alive(ENGINE_SECONDS), serving.front.engine.state
    if not alive and state.status == "ok":
        state = replace(state, status="engine does not answer")
    return {"model": serving.names[0]} | {name: value for name, value in asdict(state).items() if value}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: HTTPRequest) -> Response:
    """The metrics of all loaded models and of all processes, in Prometheus' text format. For an engine that does not
    respond, only those that the API processes count."""
    models = await asyncio.gather(*map(_metrics_of, catalogue_of(request).loaded()))
    own = WorkerReport.of(request.app.state.http_meter, {model.model: model.meter for model in models})
    total = total_of(own, await request.app.state.reports())
    models = [replace(model, meter=total.fronts[model.model]) for model in models]
    return Response(exposition(models, total.http, request.app.state.batches.stats), media_type=CONTENT_TYPE)


async def _metrics_of(serving: Serving) -> ModelMetrics:
    try:
        stats = await asyncio.wait_for(serving.front.stats(), ENGINE_SECONDS)
    except (EngineDead, TimeoutError):
        stats = None
    front = serving.front
    return ModelMetrics(serving.names[0], front.meter, stats, front.info.max_adapters if stats else 0)


@router.get("/version")
async def version() -> Response:
    return json_response({"version": __version__})
