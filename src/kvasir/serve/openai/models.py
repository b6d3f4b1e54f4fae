"""GET /v1/models and /v1/models/{id}"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.serve.serving import Serving, json_response, serving_of

router = APIRouter()


@router.get("/v1/models", tags=["openai"])
async def models(request: HTTPRequest) -> Response:
    serving = serving_of(request)
    return json_response({"object": "list", "data": [_model(serving, name) for name in serving.names]})


@router.get("/v1/models/{name:path}", tags=["openai"])
async def model(name: str, request: HTTPRequest) -> Response:
    serving = serving_of(request)
    serving.check_model(name)
    return json_response(_model(serving, name))


def _model(serving: Serving, name: str) -> dict[str, Any]:
    info = serving.front.info
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "kvasir",
        "root": serving.names[0],
        "max_model_len": info.max_model_len,
    }
