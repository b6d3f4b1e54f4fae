"""The replicas of models: GET /fleet shows them, the other routes replace, add or take away some while they serve."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.engine.client import Fleet
from kvasir.errors import ModelNotFound, quoted
from kvasir.serve.auth.scopes import MANAGEMENT
from kvasir.serve.hosting.catalogue import catalogue_of, loaded_as
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.responses import json_response
from kvasir.serve.http.wire import Wire

router = APIRouter(route_class=JsonRoute, tags=["fleet"])

MOST_GRACE = 86400.0  # seconds

Grace = Annotated[float, Field(ge=0, le=MOST_GRACE)]


class RestartRequest(Wire):
    """POST /fleet/restart and /fleet/replicas/{index}/restart

    grace: seconds for which a replica may finish the requests that it has; then they go on at another one.
    """

    grace: Grace = 0.0


class ScaleRequest(Wire):
    """POST /fleet/scale

    replicas: how many there are to be. grace: as for a restart, of those that end.
    """

    replicas: int
    grace: Grace = 0.0


@router.get("/fleet")
async def status(request: HTTPRequest, model: str | None = None) -> Response:
    """The replicas of the model in ?model=, by default of the first loaded one that has some: their states, their load,
    and what became of the requests routed to them; `scaling`: how many there should be at present and the limits, if
    the number follows the load; `models`: all loaded models with replicas."""
    return _shown(request, *await _fleet(request, model))


@router.post("/fleet/replicas/{index}/restart", tags=[MANAGEMENT])
async def restart_one(index: int, wire: RestartRequest, request: HTTPRequest, model: str | None = None) -> Response:
    """Replaces a replica of the model in ?model=; responds when the new one takes requests. Its streams go on
    elsewhere."""
    name, fleet = await _fleet(request, model)
    await fleet.restart_replica(index, wire.grace)
    return _shown(request, name, fleet)


@router.post("/fleet/restart", tags=[MANAGEMENT])
async def restart_all(wire: RestartRequest, request: HTTPRequest, model: str | None = None) -> Response:
    """Replaces one replica of the model in ?model= after another; responds when all are new."""
    name, fleet = await _fleet(request, model)
    await fleet.restart_all(wire.grace)
    return _shown(request, name, fleet)


@router.post("/fleet/scale", tags=[MANAGEMENT])
async def scale(wire: ScaleRequest, request: HTTPRequest, model: str | None = None) -> Response:
    """Starts or ends replicas of the model in ?model= until there are as many; at most those of --max-replicas. With
    --min-replicas the load changes the number later."""
    name, fleet = await _fleet(request, model)
    await fleet.scale(wire.replicas, wire.grace)
    return _shown(request, name, fleet)


def _fleets(request: HTTPRequest) -> dict[str, Fleet]:
    """The loaded models with replicas, by their first names."""
    found = ((serving.names[0], serving.front.engine) for serving in catalogue_of(request).loaded())
    return {name: engine for name, engine in found if isinstance(engine, Fleet)}


async def _fleet(request: HTTPRequest, model: str | None) -> tuple[str, Fleet]:
    """The name and the fleet of a loaded model, None for the first one that has replicas. Raises ModelNotFound."""
    fleets = _fleets(request)
    if model is None:
        for found in fleets.items():
            return found
        raise ModelNotFound("this server has no replicas", "start it with --replicas", "model")
    serving = await loaded_as(catalogue_of(request), model)
    if serving is None:
        raise ModelNotFound(f"the model {quoted(model)} is not loaded", "a request loads it", "model")
    if serving.names[0] not in fleets:
        raise ModelNotFound(f"the model {quoted(model)} has no replicas", "start it with --replicas", "model")
    return serving.names[0], fleets[serving.names[0]]


def _shown(request: HTTPRequest, model: str, fleet: Fleet) -> Response:
    views = [asdict(view) for view in fleet.views]
    content = {"model": model, "models": [*_fleets(request)], "replicas": views}
    return json_response(content | {"scaling": asdict(fleet.scaling)} if fleet.scaling else content)
