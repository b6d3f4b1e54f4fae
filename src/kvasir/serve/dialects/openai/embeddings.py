"""POST /v1/embeddings"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.engine.scoring import first_dimensions
from kvasir.errors import InvalidRequest
from kvasir.serve.conversation.limits import charge
from kvasir.serve.conversation.scheduling import scheduling_fields
from kvasir.serve.dialects.openai.wire import EmbeddingRequest
from kvasir.serve.hosting.catalogue import serving_of
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.asgi import while_connected
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.concurrent import all_of
from kvasir.serve.http.responses import write_json
from kvasir.serve.http.vectors import base64_of, raw
from kvasir.serve.http.wire import prompt_list
from kvasir.types import Request

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/embeddings", tags=["openai"])
async def embeddings(wire: EmbeddingRequest, request: HTTPRequest) -> Response:
    serving = await serving_of(request, wire.model)
    requests = await to_requests(wire, serving, request)
    charge(serving, requests, request, whole=False)
    work = all_of(serving.front.embed, requests)
    vectors = await while_connected(request.receive, work)
    tokens = sum(len(core.prompt_ids) for core in requests)

    def answer() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [raw(_entry(i, vector, wire)) for i, vector in enumerate(vectors)],
            "model": serving.names[0],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    return await write_json(len(requests) > 16, answer)


async def to_requests(wire: EmbeddingRequest, serving: Serving, request: HTTPRequest) -> list[Request]:
    """One request of the core per input. Raises InvalidRequest."""
    front, most = serving.front, serving.settings.max_embeddings
    size = front.info.embedding_size
    if wire.dimensions is not None and not 1 <= wire.dimensions <= size:
        message = f"dimensions is {wire.dimensions}; this model gives {size}"
        raise InvalidRequest(message, f"expected at least 1 and at most {size}", param="dimensions")
    inputs = prompt_list(wire.input)
    if len(inputs) > most:
        raise InvalidRequest(f"{len(inputs)} inputs", f"at most {most}", param="input")
    fields = scheduling_fields(wire, serving, request)
    texts = [given for given in inputs if isinstance(given, str)]
    special = wire.add_special_tokens is not False
    encoded = iter(await front.encode_all(texts, add_special_tokens=special))
    ids = (next(encoded) if isinstance(given, str) else given for given in inputs)
    return [front.resolve_embedding(each, **fields) for each in ids]


def _entry(index: int, vector: Sequence[float], wire: EmbeddingRequest) -> dict[str, Any]:
    """One embedding: a list of numbers, or base64."""
    if wire.dimensions is not None:
        vector = first_dimensions(vector, wire.dimensions)
    value = base64_of(vector) if wire.encoding_format == "base64" else vector
    return {"object": "embedding", "index": index, "embedding": value}
