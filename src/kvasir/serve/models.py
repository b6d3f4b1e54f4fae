"""/v1/models and /v1/models/{id}, for clients of both dialects that have these routes."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.serve.auth.scopes import MANAGEMENT
from kvasir.serve.dialects.anthropic.models import model_object, model_page, speaks
from kvasir.serve.dialects.ollama.manage import store_of
from kvasir.serve.dialects.ollama.route import faults_of_files
from kvasir.serve.hosting.catalogue import Card, catalogue_of
from kvasir.serve.http.responses import json_response

router = APIRouter()


@router.get("/v1/models", tags=["openai"])
async def models(request: HTTPRequest) -> Response:
    """With the header anthropic-version, a page in Anthropic's format, selected by limit, after_id and before_id."""
    cards = await catalogue_of(request).cards()
    if speaks(request):
        return json_response(model_page(cards, request))
    return json_response({"object": "list", "data": [_model(card) for card in cards]})


@router.get("/v1/models/{name:path}", tags=["openai"])
async def model(name: str, request: HTTPRequest) -> Response:
    card = await catalogue_of(request).card(name)
    return json_response(model_object(card) if speaks(request) else _model(card))


@router.delete("/v1/models/{name:path}", tags=["openai", MANAGEMENT])
async def delete(name: str, request: HTTPRequest) -> Response:
    """Removes a model from the store, with its weights if no other model uses them."""
    store = store_of(request)
    with faults_of_files():
        await asyncio.to_thread(store.remove, name)
    return json_response({"id": name, "object": "model", "deleted": True})


def _model(card: Card) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "kvasir",
        "root": card.root,
        "parent": card.parent,
        "max_model_len": card.max_model_len,
    }
