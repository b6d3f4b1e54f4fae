"""POST /v1/embeddings"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.engine.scoring import first_dimensions, token_embeddings
from kvasir.errors import InvalidRequest
from kvasir.serve.conversation.limits import check_values
from kvasir.serve.conversation.lora_path import PARAM, for_all
from kvasir.serve.dialects.openai.pooled import check_dimensions, requests_of, results_of
from kvasir.serve.dialects.openai.wire import EmbeddingRequest
from kvasir.serve.hosting.catalogue import serving_of
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.responses import write_json
from kvasir.serve.http.vectors import base64_of, raw
from kvasir.types import Request, Task

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/embeddings", tags=["openai"])
async def embeddings(wire: EmbeddingRequest, request: HTTPRequest) -> Response:
    field, named = ("task", wire.task) if wire.lora_path is None else (PARAM, for_all(wire.lora_path))
    serving = await serving_of(request, wire.model, adapter=named, param=field)
    requests = await to_requests(wire, serving, request)
    vectors = await results_of(requests, serving, request)
    tokens, front = sum(len(core.prompt_ids) for core in requests), serving.front

    def shaped(core: Request, values: Sequence[float]) -> Sequence[Any]:
        return token_embeddings(front, core.prompt_ids, values) if wire.pooling else values

    def answer() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [raw(_entry(i, shaped(*one), wire)) for i, one in enumerate(zip(requests, vectors, strict=True))],
            "model": serving.names[0],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    return await write_json(len(requests) > 16 or wire.pooling is not None, answer)


async def to_requests(wire: EmbeddingRequest, serving: Serving, request: HTTPRequest) -> list[Request]:
    """One request of the core per input. Raises InvalidRequest."""
    task, info = Task.TOKEN_EMBED if wire.pooling else Task.EMBED, serving.front.info
    if wire.pooling and wire.dimensions is not None:
        raise InvalidRequest("dimensions without pooling", "leave it out", param="dimensions")
    check_dimensions(wire.dimensions, info.embedding_size)
    prompts, special = serving.front.prompts, wire.add_special_tokens is not False
    before = prompts.of(wire.task if wire.prompt_name is None and wire.task in prompts.named else wire.prompt_name)
    more: dict[str, Any] = {"special": special, "before": before, "lora_path": wire.lora_path}
    requests = await requests_of(wire, wire.input, serving, request, task, **more)
    check_values(info, task, requests)
    return requests


def _entry(index: int, vector: Sequence[Any], wire: EmbeddingRequest) -> dict[str, Any]:
    """One embedding: a list of numbers, or base64; without pooling, a list of lists, in base64 one after the other."""
    if wire.dimensions is not None:
        vector = first_dimensions(vector, wire.dimensions)
    flat = wire.encoding_format == "base64" and wire.pooling
    vector = [x for row in vector for x in row] if flat else vector
    value = base64_of(vector) if wire.encoding_format == "base64" else vector
    return {"object": "embedding", "index": index, "embedding": value}
