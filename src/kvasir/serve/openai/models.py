"""GET /v1/models and /v1/models/{id}"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.serve.catalogue import Card, catalogue_of
from kvasir.serve.serving import json_response

router = APIRouter()


@router.get("/v1/models", tags=["openai"])
async def models(request: HTTPRequest) -> Response:
    return json_response({"object": "list", "data": [_model(card) for card in catalogue_of(request).cards()]})


@router.get("/v1/models/{name:path}", tags=["openai"])
async def model(name: str, request: HTTPRequest) -> Response:
    return json_response(_model(catalogue_of(request).card(name)))


def _model(card: Card) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "kvasir",
        "root": card.root,
        "max_model_len": card.max_model_len,
    }
