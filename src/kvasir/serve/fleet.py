"""The replicas of a model: GET /fleet shows them, the other routes replace, add or take away some while they serve."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.engine.client import Fleet
from kvasir.errors import ModelNotFound
from kvasir.serve.auth.scopes import MANAGEMENT
from kvasir.serve.hosting.catalogue import catalogue_of
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
async def status(request: HTTPRequest) -> Response:
    """The replicas with their states, their load, and what became of the requests routed to them; `scaling`: how many
    there should be at present and the limits, if the number follows the load."""
    return json_response(_views(_fleet(request)))


@router.post("/fleet/replicas/{index}/restart", tags=[MANAGEMENT])
async def restart_one(index: int, wire: RestartRequest, request: HTTPRequest) -> Response:
    """Replaces a replica; responds when the new one takes requests. Its streams go on elsewhere."""
    fleet = _fleet(request)
    await fleet.restart_replica(index, wire.grace)
    return json_response(_views(fleet))


@router.post("/fleet/restart", tags=[MANAGEMENT])
async def restart_all(wire: RestartRequest, request: HTTPRequest) -> Response:
    """Replaces one replica after another; responds when all are new."""
    fleet = _fleet(request)
    await fleet.restart_all(wire.grace)
    return json_response(_views(fleet))


@router.post("/fleet/scale", tags=[MANAGEMENT])
async def scale(wire: ScaleRequest, request: HTTPRequest) -> Response:
    """Starts or ends replicas until there are as many; at most those of --max-replicas. With --min-replicas the load
    changes the number later."""
    fleet = _fleet(request)
    await fleet.scale(wire.replicas, wire.grace)
    return json_response(_views(fleet))


def _fleet(request: HTTPRequest) -> Fleet:
    """The fleet of the server. Raises ModelNotFound if it has none."""
    for serving in catalogue_of(request).loaded():
        if isinstance(engine := serving.front.engine, Fleet):
            return engine
    raise ModelNotFound("this server has no replicas", "start it with --replicas", "model")


def _views(fleet: Fleet) -> dict[str, Any]:
    found = {"replicas": [asdict(view) for view in fleet.views]}
    return found | {"scaling": asdict(fleet.scaling)} if fleet.scaling else found
