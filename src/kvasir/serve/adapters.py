"""Adapters that come and go while the server runs, by the routes of vLLM, /v1/load_lora_adapter and
/v1/unload_lora_adapter, and of SGLang, /load_lora_adapter and /unload_lora_adapter."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response

from kvasir.adapters import AdapterOption, check_name
from kvasir.engine.front import Front
from kvasir.errors import InvalidRequest, quoted
from kvasir.serve.auth.scopes import MANAGEMENT
from kvasir.serve.hosting.adapters import faults_of_files
from kvasir.serve.hosting.catalogue import catalogue_of, serving_of
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.responses import json_response
from kvasir.serve.http.wire import Name, Wire

router = APIRouter(route_class=JsonRoute, tags=["adapters", MANAGEMENT])


class LoadRequest(Wire):
    """POST /v1/load_lora_adapter and /load_lora_adapter

    lora_path: a folder or GGUF file in a folder of --lora-dir. load_inplace: it may replace an adapter of this name;
    running requests keep the old one. pinned: it stays in memory. model: needed if the server has several.
    """

    IGNORED: ClassVar = ("is_3d_lora_weight", "lora_id")  # shapes and names tell

    lora_name: Name
    lora_path: Name
    load_inplace: bool = False
    pinned: bool = False
    model: Name | None = None
    is_3d_lora_weight: bool | None = None
    lora_id: str | None = None


class UnloadRequest(Wire):
    """POST /v1/unload_lora_adapter and /unload_lora_adapter"""

    IGNORED: ClassVar = ("lora_int_id", "lora_id")

    lora_name: Name
    model: Name | None = None
    lora_int_id: int | None = None
    lora_id: str | None = None


@router.post("/v1/load_lora_adapter")
async def load(wire: LoadRequest, request: HTTPRequest) -> Response:
    """Loads an adapter that requests then select by its name."""
    await _load(wire, request)
    return PlainTextResponse(f"Success: LoRA adapter '{wire.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload(wire: UnloadRequest, request: HTTPRequest) -> Response:
    """Forgets an adapter; running requests keep it."""
    await _unload(wire, request)
    return PlainTextResponse(f"Success: LoRA adapter '{wire.lora_name}' removed successfully.")


@router.post("/load_lora_adapter")
async def load_as_sglang(wire: LoadRequest, request: HTTPRequest) -> Response:
    """The same, with SGLang's response."""
    return json_response(_result(await _load(wire, request)))


@router.post("/unload_lora_adapter")
async def unload_as_sglang(wire: UnloadRequest, request: HTTPRequest) -> Response:
    """The same, with SGLang's response."""
    return json_response(_result(await _unload(wire, request)))


async def _load(wire: LoadRequest, request: HTTPRequest) -> Front:
    name, catalogue = check_name(wire.lora_name, "lora_name"), catalogue_of(request)
    serving = await serving_of(request, wire.model)
    if any(name in model.names for model in catalogue.loaded()):
        raise InvalidRequest(f"{quoted(name)} is the name of a model", "choose another", param="lora_name")
    path = await asyncio.to_thread(catalogue.folders.path, wire.lora_path)
    with faults_of_files():
        option = AdapterOption(name, path, pinned=wire.pinned)
        await serving.front.adapters.load(option, replacing=wire.load_inplace)
    return serving.front


async def _unload(wire: UnloadRequest, request: HTTPRequest) -> Front:
    serving = await serving_of(request, wire.model)
    await serving.front.adapters.unload(wire.lora_name)
    return serving.front


def _result(front: Front) -> dict[str, Any]:
    loaded = {info.name: info.name for info in front.adapters.known}
    return {"success": True, "error_message": "", "loaded_adapters": loaded}
