"""Models of the store: POST /api/pull, /api/create, /api/copy and /api/push, DELETE /api/delete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.errors import InvalidRequest, QueueFull
from kvasir.serve.auth.scopes import MANAGEMENT
from kvasir.serve.dialects.ollama.manage_wire import CopyRequest, CreateRequest, DeleteRequest, PullRequest, PushRequest
from kvasir.serve.dialects.ollama.route import STREAMED, faults_of_files, line, stream_lines
from kvasir.serve.hosting.catalogue import catalogue_of
from kvasir.serve.http.asgi import while_connected
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.responses import json_response
from kvasir.serve.http.wire import refuse_fields
from kvasir.serve.telemetry.audit import set_outcome
from kvasir.store.job import follow
from kvasir.store.modelfile import Modelfile
from kvasir.store.progress import PullProgress
from kvasir.store.store import ModelStore

router = APIRouter(route_class=JsonRoute)

AT_ONCE = 2  # maximum number of concurrent pulls and creations
SUCCESS = {"status": "success"}
_QUANTIZE = {"q8_0": "q8", "q4_0": "q4"}  # GGUF's names for formats to which weights are rounded while loading


def store_of(request: HTTPRequest) -> ModelStore:
    """The server's store. Raises InvalidRequest if it has none."""
    store = catalogue_of(request).store
    if store is None:
        raise InvalidRequest(
            "this server serves one model and does not manage models", "start `kvasir serve` without a model"
        )
    return store


@router.post("/api/pull", tags=["ollama", MANAGEMENT], responses=STREAMED)
async def pull(wire: PullRequest, request: HTTPRequest) -> Response:
    refuse_fields(wire)
    store, name = store_of(request), wire.named
    return await _respond(request, wire.stream, follow(lambda report, stop: store.pull(name, report=report, stop=stop)))


@router.post("/api/create", tags=["ollama", MANAGEMENT], responses=STREAMED)
async def create(wire: CreateRequest, request: HTTPRequest) -> Response:
    refuse_fields(wire)
    store, name, recipe = store_of(request), wire.named, to_recipe(wire)
    changes = follow(
        lambda report, stop: store.create(
            name,
            recipe,
            files=wire.files,
            draft_files=wire.draft_files,
            adapter_files=wire.adapters,
            report=report,
            stop=stop,
        )
    )
    return await _respond(request, wire.stream, changes)


def to_recipe(wire: CreateRequest) -> Modelfile:
    """The Modelfile of the request. Raises InvalidRequest."""
    messages = []
    for i, message in enumerate(wire.messages or ()):
        if message.model_fields_set - {"role", "content"}:
            raise InvalidRequest("only a role and a content can be stored", "leave the rest out", f"messages.{i}")
        messages.append({"role": message.role, "content": message.content or ""})
    quantize, draft_quantize = wire.quantize or wire.quantization or None, wire.draft_quantize or None
    license = [wire.license] if isinstance(wire.license, str) else wire.license or []
    return Modelfile(
        (wire.from_,) if wire.from_ else (),
        wire.parameters or {},
        wire.template or None,
        wire.system or None,
        tuple(messages),
        tuple(license),
        wire.requires or "",
        quantize and _QUANTIZE.get(quantize.lower(), quantize),
        wire.draft or None,
        draft_quantize and _QUANTIZE.get(draft_quantize.lower(), draft_quantize),
    )


@router.post("/api/copy", tags=["ollama", MANAGEMENT])
async def copy(wire: CopyRequest, request: HTTPRequest) -> Response:
    store = store_of(request)
    with faults_of_files():
        await asyncio.to_thread(store.copy, wire.source, wire.destination)
    return json_response(SUCCESS)


@router.delete("/api/delete", tags=["ollama", MANAGEMENT])
async def delete(wire: DeleteRequest, request: HTTPRequest) -> Response:
    store = store_of(request)
    with faults_of_files():
        await asyncio.to_thread(store.remove, wire.named)
    return json_response(SUCCESS)


@router.post("/api/push", tags=["ollama", MANAGEMENT])
async def push(wire: PushRequest, request: HTTPRequest) -> Response:
    raise InvalidRequest("pushing to a registry is not supported", "upload the files to a hub yourself", "model")


async def _respond(request: HTTPRequest, stream: bool | None, changes: AsyncGenerator[PullProgress]) -> Response:
    lines = _lines(request, changes)
    if stream is not False:
        return stream_lines(catalogue_of(request).settings.ping, lines, {"status": "working"})
    return await while_connected(request.receive, _drained(lines))


async def _drained(lines: AsyncGenerator[bytes]) -> Response:
    async with aclosing(lines):
        async for _ in lines:
            pass
    return json_response(SUCCESS)


async def _lines(request: HTTPRequest, changes: AsyncGenerator[PullProgress]) -> AsyncGenerator[bytes]:
    """The progress as lines. Raises InvalidRequest, QueueFull."""
    with _turn(request.app.state), faults_of_files():
        try:
            async with aclosing(changes):
                async for progress in changes:
                    yield line(_shown(progress))
        except Exception:
            set_outcome(request, "failed")  # which the status cannot express once lines were sent
            raise


def _shown(progress: PullProgress) -> dict[str, Any]:
    shown: dict[str, Any] = {"status": progress.status}
    if progress.digest:
        shown["digest"] = f"sha256:{progress.digest}"
    if progress.total:
        shown |= {"total": progress.total, "completed": progress.completed}
    return shown


@contextmanager
def _turn(state: Any) -> Iterator[None]:
    """Limits the concurrent changes, since each occupies a thread. Raises QueueFull."""
    running = getattr(state, "changes", 0)
    if running >= AT_ONCE:
        raise QueueFull(f"{running} models are being pulled or created", "wait for one of them", retry_after=30.0)
    state.changes = running + 1
    try:
        yield
    finally:
        state.changes -= 1
