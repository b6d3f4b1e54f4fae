"""What an operator does to the engines of a server: POST /reset_prefix_cache, as in vLLM; /flush_cache and
/abort_request, as in SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.errors import InvalidRequest
from kvasir.serve.auth.scopes import MANAGEMENT
from kvasir.serve.hosting.catalogue import catalogue_of, loaded_as
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.responses import json_response
from kvasir.serve.http.wire import Name, Wire

router = APIRouter(route_class=JsonRoute, tags=["server", MANAGEMENT])


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(
    request: HTTPRequest,
    model: str | None = None,
    reset_running_requests: bool = False,
    reset_external: bool = False,
) -> Response:
    """Forgets all cached prefixes of the model in ?model=, by default of all loaded models, in all replicas. Requests
    under way keep what they have. What --cache-dir has saved stays there."""
    for name, value in (("reset_running_requests", reset_running_requests), ("reset_external", reset_external)):
        if value:
            raise InvalidRequest(f"{name} is not supported with this value", "leave it out", param=name)
    freed = [await serving.front.engine.reset_prefix_cache() for serving in await _loaded(request, model)]
    return json_response({"status": "ok", "freed_blocks": sum(freed)})


@router.post("/flush_cache", tags=["sglang"])
async def flush_cache(request: HTTPRequest) -> Response:
    """The same of all loaded models."""
    return await reset_prefix_cache(request)


class AbortRequest(Wire):
    """POST /abort_request"""

    IGNORED: ClassVar = ("finished_reason", "abort_message")

    rid: Name = ""
    abort_all: bool = False
    finished_reason: Any = None
    abort_message: str | None = None


@router.post("/abort_request", tags=["sglang"])
async def abort_request(wire: AbortRequest, request: HTTPRequest) -> Response:
    """Aborts a request, by its `rid`, its X-Request-Id or the id of its response, or all that generate. What it has
    generated is lost, except in SGLang's format; its client gets the error `request_aborted`. The response tells how
    many there were."""
    if not wire.rid and not wire.abort_all:
        raise InvalidRequest("no request is named", "give rid, or abort_all", param="rid")
    aborted = await request.app.state.abort(None if wire.abort_all else wire.rid)
    return json_response({"status": "ok", "aborted": aborted})


async def _loaded(request: HTTPRequest, model: str | None) -> Sequence[Serving]:
    """The loaded model of this name, or all loaded models; never loads one. Raises ModelNotFound."""
    catalogue = catalogue_of(request)
    if model is None:
        return catalogue.loaded()
    found = await loaded_as(catalogue, model)
    return () if found is None else (found,)
