"""POST /api/embed, and the older /api/embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.engine.front import Bound
from kvasir.engine.scoring import first_dimensions
from kvasir.errors import InvalidRequest, PromptTooLong
from kvasir.serve.conversation.limits import charge
from kvasir.serve.conversation.scheduling import scheduling_fields
from kvasir.serve.dialects.ollama.answer import Clock
from kvasir.serve.dialects.ollama.params import context_of, options_of
from kvasir.serve.dialects.ollama.prompt import cut_ids
from kvasir.serve.dialects.ollama.route import serving_named
from kvasir.serve.dialects.ollama.wire import EmbeddingsRequest, EmbedRequest
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.asgi import while_connected
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.concurrent import all_of
from kvasir.serve.http.responses import json_response, write_json
from kvasir.serve.http.vectors import raw
from kvasir.types import Request

router = APIRouter(route_class=JsonRoute)


@router.post("/api/embed", tags=["ollama"])
async def embed(wire: EmbedRequest, request: HTTPRequest) -> Response:
    clock = Clock()
    serving = await serving_named(request, wire.model, wire.keep_alive)
    clock.loaded()
    inputs = [wire.input] if isinstance(wire.input, str) else wire.input
    if wire.input in ("", []):
        return json_response({"model": wire.model, "embeddings": [], **clock.loading()})
    size = serving.front.info.embedding_size
    if wire.dimensions is not None and not 0 <= wire.dimensions <= size:
        raise InvalidRequest(f"dimensions is {wire.dimensions}; this model gives {size}", "lower it", "dimensions")
    requests, cut = await to_requests(inputs, wire, serving, request, "input")
    vectors = await _vectors(requests, serving, request)

    def answer() -> dict[str, Any]:
        return {
            "model": wire.model,
            "embeddings": [raw(first_dimensions(vector, wire.dimensions or len(vector))) for vector in vectors],
            **clock.loading(),
            "prompt_eval_count": sum(len(core.prompt_ids) for core in requests),
            **({"truncated": {"tokens": cut}} if cut else {}),
        }

    return await write_json(len(requests) > 16, answer)


@router.post("/api/embeddings", tags=["ollama"])
async def embeddings(wire: EmbeddingsRequest, request: HTTPRequest) -> Response:
    serving = await serving_named(request, wire.model, wire.keep_alive)
    if not wire.prompt:
        return json_response({"embedding": []})
    requests, _ = await to_requests([wire.prompt], wire, serving, request, "prompt")
    [vector] = await _vectors(requests, serving, request)
    return json_response({"embedding": vector})


async def to_requests(
    inputs: Sequence[str], wire: EmbedRequest | EmbeddingsRequest, serving: Serving, request: HTTPRequest, param: str
) -> tuple[list[Request], int]:
    """One request of the core per input, and the minimum number of tokens cut. Raises InvalidRequest."""
    front, most = serving.front, serving.settings.max_embeddings
    if len(inputs) > most:
        raise InvalidRequest(f"{len(inputs)} inputs", f"at most {most}", param)
    options = options_of(wire.options, serving.entry.parameters if serving.entry else {})
    context = context_of(options, front.info)
    fields = scheduling_fields(wire, serving, request)
    requests, cut = [], 0
    truncated = isinstance(wire, EmbedRequest) and bool(wire.truncate)
    bound: Bound = None if truncated else "context"
    for ids in await front.encode_all(inputs, param=param, bound=bound, first=context if truncated else 0):
        if truncated:
            ids, left_out = cut_ids(ids, context, context)
            cut += left_out
        if len(ids) > context:
            message = f"the input has {len(ids)} tokens; the context holds {context}"
            hint = "shorten it, or use /api/embed with truncate: true"
            raise PromptTooLong(message, hint, param, tokens=len(ids), context=context)
        requests.append(front.resolve_embedding(ids, **fields))
    return requests, cut


async def _vectors(requests: Sequence[Request], serving: Serving, request: HTTPRequest) -> list[tuple[float, ...]]:
    await charge(serving, requests, request, whole=False)
    return await while_connected(request.receive, all_of(serving.front.embed, requests))
