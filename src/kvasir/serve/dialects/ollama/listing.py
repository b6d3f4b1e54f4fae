"""GET /api/tags, /api/ps and /api/version; POST /api/show."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir import __version__
from kvasir.serve.dialects.ollama.about import (
    shown,
    shown_of,
    shown_of_one,
    summary,
    summary_of,
    summary_of_adapter,
    summary_of_one,
)
from kvasir.serve.dialects.ollama.answer import timestamp
from kvasir.serve.dialects.ollama.manage_wire import ShowRequest
from kvasir.serve.dialects.ollama.route import faults_of_files, full_name
from kvasir.serve.hosting.catalogue import Card, Catalogue, catalogue_of, loaded_as
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.responses import json_response
from kvasir.serve.http.wire import refuse_fields
from kvasir.store.entry import ModelEntry
from kvasir.store.store import ModelStore

router = APIRouter(route_class=JsonRoute)

SPOKEN = "0.14.0"  # the version of Ollama whose API this is; clients query it, and some require a minimum
NEVER = "9999-12-31T23:59:59Z"


@router.head("/api/version", tags=["ollama"])
@router.get("/api/version", tags=["ollama"])
async def version() -> Response:
    return json_response({"version": SPOKEN, "kvasir": __version__})


@router.head("/api/tags", tags=["ollama"])
@router.get("/api/tags", tags=["ollama"])
async def tags(request: HTTPRequest) -> Response:
    """The models that requests may name."""
    catalogue = catalogue_of(request)
    loaded = {name: serving for serving in catalogue.loaded() for name in serving.names}
    models = [_listed(card, loaded) for card in await catalogue.cards()]
    return json_response({"models": models})


def _listed(card: Card, loaded: Mapping[str, Serving]) -> dict[str, Any]:
    name = card.parent or card.name
    model = summary_of(card.offer) if card.offer else summary_of_one(loaded[name], name)
    return summary_of_adapter(model, card) if card.parent else model


@router.get("/api/ps", tags=["ollama"])
async def ps(request: HTTPRequest) -> Response:
    catalogue = catalogue_of(request)
    return json_response({"models": [_running(serving, catalogue) for serving in catalogue.loaded()]})


def _running(serving: Serving, catalogue: Catalogue) -> dict[str, Any]:
    info, name = serving.front.info, serving.names[0]
    entry = summary(serving.entry) if serving.entry else summary_of_one(serving, name)
    del entry["modified_at"]
    expires = catalogue.expires(serving)
    return {
        **entry,
        "expires_at": NEVER if expires is None else timestamp(expires),
        "size_vram": 0 if info.device == "cpu" else entry["size"],
        "context_length": info.max_model_len,
    }


@router.post("/api/show", tags=["ollama"])
async def show(wire: ShowRequest, request: HTTPRequest) -> Response:
    refuse_fields(wire)
    catalogue = catalogue_of(request)
    name = await full_name(catalogue, wire.named)
    offer = (await catalogue.card(name)).offer
    if offer and offer.entry and catalogue.store:
        with faults_of_files():
            return await asyncio.to_thread(_stored, catalogue.store, offer.entry, bool(wire.verbose))
    serving = await loaded_as(catalogue, name)
    if serving is None:
        assert offer is not None, "what is not loaded is offered"
        return json_response(shown_of(offer))
    return json_response(shown_of_one(serving, name))


def _stored(store: ModelStore, entry: ModelEntry, verbose: bool) -> Response:
    """The response of a stored model. Raises ModelFileError."""
    return json_response(shown(entry, store.model_info(entry, verbose)))
