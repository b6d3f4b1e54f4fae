"""GET /health, /ping, /load, /metrics and /version: about the server itself."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response

from kvasir import __version__
from kvasir.engine.client import ASLEEP
from kvasir.errors import EngineDead
from kvasir.serve.hosting.catalogue import catalogue_of, loaded_of
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.responses import json_response
from kvasir.serve.telemetry.metrics import CONTENT_TYPE, ModelMetrics, exposition
from kvasir.serve.telemetry.reports import WorkerReport, total_of
from kvasir.serve.telemetry.vllm import vllm_families
from kvasir.types import Task

router = APIRouter(tags=["server"])

ENGINE_SECONDS = 2.0  # for an engine to say that it is there
STATS_SECONDS = 5.0  # for its statistics: a fleet waits for a replica that has fallen silent, but not so long


@router.head("/health", include_in_schema=False)
@router.get("/health")
@router.get("/v1/health", include_in_schema=False)
async def health(request: HTTPRequest) -> Response:
    """200 if the loop of each engine responds, otherwise 503 with the facts about the first engine that does not: its
    model, the status (starting, restarting, ended, engine does not answer), the reason, the number of restart attempts,
    and the time of the next one (seconds since 1970). Also 503 while the server shuts down. A model that was put to
    sleep is well."""
    if request.app.state.drain_gate.closed:
        return json_response({"status": "draining"}, 503)
    states = await asyncio.gather(*map(_state, catalogue_of(request).loaded()))
    wrong = [state for state in states if state["status"] not in ("ok", ASLEEP)]
    return json_response(wrong[0] if wrong else {"status": "ok"}, 503 if wrong else 200)


async def _state(serving: Serving) -> dict[str, Any]:
    """The state of an engine for the response, without empty fields."""
    alive, state = await serving.front.alive(ENGINE_SECONDS), serving.front.engine.state
    if not alive and state.status == "ok":
        state = replace(state, status="engine does not answer")
    return {"model": serving.names[0]} | {name: value for name, value in asdict(state).items() if value}


@router.get("/is_sleeping")
async def is_sleeping(request: HTTPRequest, model: str | None = None) -> Response:
    """Whether the model in ?model= was put to sleep, by default any; as in vLLM."""
    return json_response({"is_sleeping": await catalogue_of(request).is_sleeping(model)})


@router.head("/ping", include_in_schema=False)
@router.post("/ping", include_in_schema=False)
@router.get("/ping")
async def ping() -> Response:
    """200 as long as the server's process answers, whatever its engines do: for supervisors that restart processes."""
    return json_response({"status": "ok"})


@router.get("/load")
async def load(request: HTTPRequest) -> Response:
    """The requests that are open, as in vLLM."""
    fronts = [serving.front for serving in catalogue_of(request).loaded()]
    return json_response({"server_load": sum(front.meter.open_requests for front in fronts)})


@router.get("/get_model_info", tags=["sglang"])
@router.get("/model_info", tags=["sglang"])
async def model_info(request: HTTPRequest) -> Response:
    """What is served, as in SGLang: of the first loaded model."""
    serving = await loaded_of(request, None)
    info = serving.front.info
    own = {name: value for name, value in info.default_sampling.items() if value is not None}
    return json_response(
        {
            "model_path": serving.names[0],
            "tokenizer_path": serving.names[0],
            "is_generation": Task.GENERATE in info.tasks,
            "preferred_sampling_params": own or None,
            "max_total_num_tokens": info.max_model_len,
        }
    )


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: HTTPRequest) -> Response:
    """The metrics of all loaded models and of all processes, in Prometheus' text format. For an engine that does not
    respond, only those that the API processes count."""
    models = await asyncio.gather(*map(_metrics_of, catalogue_of(request).loaded()))
    own = WorkerReport.of(request.app.state.http_meter, {model.model: model.meter for model in models})
    total = total_of(own, await request.app.state.reports())
    models = [replace(model, meter=total.fronts[model.model]) for model in models]
    others = vllm_families(models) if catalogue_of(request).settings.vllm_metrics else ()
    text = exposition(models, total.http, request.app.state.batches.stats, others)
    return Response(text, media_type=CONTENT_TYPE)


async def _metrics_of(serving: Serving) -> ModelMetrics:
    try:
        stats = await asyncio.wait_for(serving.front.stats(), STATS_SECONDS)
    except (EngineDead, TimeoutError):
        stats = None
    front = serving.front
    return ModelMetrics(serving.names[0], front.meter, stats, front.info.max_adapters if stats else 0)


@router.get("/version")
async def version() -> Response:
    return json_response({"version": __version__})
