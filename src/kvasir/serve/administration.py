"""What an operator does to the engines of a server: POST /reset_prefix_cache, /sleep and /wake_up, as in vLLM;
/flush_cache, /abort_request, /release_memory_occupation and /resume_memory_occupation, as in SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.errors import InvalidRequest, quoted
from kvasir.serve.auth.scopes import MANAGEMENT
from kvasir.serve.hosting.catalogue import catalogue_of, loaded_as
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.responses import json_response
from kvasir.serve.http.wire import Name, Wire

router = APIRouter(route_class=JsonRoute, tags=["server", MANAGEMENT])

TAGS = ("weights", "kv_cache", "cuda_graph")  # parts of the memory; here they come and go together


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


@router.post("/sleep")
async def sleep(request: HTTPRequest, model: str | None = None, level: int = 1, mode: str = "abort") -> Response:
    """Frees the memory of the model in ?model=, by default of all loaded models, in all replicas; requests get a 503
    until /wake_up. mode: `abort` ends requests under way with an error, `wait` lets them finish, for up to the seconds
    of --drain. level: 1 and 2 are the same."""
    if level not in (1, 2):
        raise InvalidRequest(f"level is {level}", "expected 1 or 2", param="level")
    if mode not in ("abort", "wait"):
        raise InvalidRequest(f"mode is {quoted(mode)}", "expected abort or wait", param="mode")
    catalogue = catalogue_of(request)
    await catalogue.sleep(model, catalogue.settings.drain if mode == "wait" else 0.0)
    return json_response({"status": "ok"})


@router.post("/wake_up")
async def wake_up(
    request: HTTPRequest, model: str | None = None, tags: Annotated[list[str] | None, Query()] = None
) -> Response:
    """Loads the model in ?model= again, by default all that sleep; responds when they take requests. tags: `weights`
    and `kv_cache` come together, whatever is asked for."""
    _check_tags(tags)
    await catalogue_of(request).wake_up(model)
    return json_response({"status": "ok"})


class MemoryRequest(Wire):
    """POST /release_memory_occupation and /resume_memory_occupation"""

    tags: Annotated[list[str], Field(max_length=16)] | None = None


@router.post("/release_memory_occupation", tags=["sglang"])
async def release_memory(wire: MemoryRequest, request: HTTPRequest) -> Response:
    """As /sleep, of all loaded models, whatever is asked for."""
    _check_tags(wire.tags)
    await catalogue_of(request).sleep(None, 0.0)
    return json_response({"status": "ok"})


@router.post("/resume_memory_occupation", tags=["sglang"])
async def resume_memory(wire: MemoryRequest, request: HTTPRequest) -> Response:
    """As /wake_up, of all models that sleep."""
    _check_tags(wire.tags)
    await catalogue_of(request).wake_up(None)
    return json_response({"status": "ok"})


def _check_tags(tags: Sequence[str] | None) -> None:
    """Raises InvalidRequest."""
    if wrong := [tag for tag in tags or () if tag not in TAGS]:
        raise InvalidRequest(f"the tag {quoted(wrong[0])}", f"expected some of {', '.join(TAGS)}", param="tags")


async def _loaded(request: HTTPRequest, model: str | None) -> Sequence[Serving]:
    """The loaded model of this name, or all loaded models; never loads one. Raises ModelNotFound."""
    catalogue = catalogue_of(request)
    if model is None:
        return catalogue.loaded()
    found = await loaded_as(catalogue, model)
    return () if found is None else (found,)
