"""POST /classify and /pooling, with the bodies of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.engine.front import Front
from kvasir.engine.scoring import first_dimensions, rows_of, scores_of, token_embeddings, token_weights
from kvasir.errors import InvalidRequest
from kvasir.serve.conversation.limits import check_values
from kvasir.serve.conversation.scheduling import Scheduling
from kvasir.serve.dialects.openai.pooled import check_dimensions, listed, requests_of, results_of
from kvasir.serve.hosting.catalogue import serving_of
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.responses import write_json
from kvasir.serve.http.vectors import base64_of, raw
from kvasir.serve.http.wire import Name, Prompts, Refused, refuse_fields
from kvasir.types import Request, Task

router = APIRouter(route_class=JsonRoute)


class ClassifyRequest(Scheduling):
    """POST /classify. use_activation: false for logits instead of scores."""

    REFUSED: ClassVar[Refused] = {
        "activation": ((True,), "use use_activation"),
        "softmax": ((True,), "use use_activation"),
    }
    IGNORED: ClassVar = ("user",)

    model: Name | None = None
    input: Prompts
    add_special_tokens: bool | None = None
    use_activation: bool | None = None
    user: Name | None = None

    activation: Any = None
    softmax: Any = None


class PoolingRequest(ClassifyRequest):
    """POST /pooling. task: None for the first that the model has."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    prompt_name: Name | None = None


@router.post("/classify", tags=["openai"])
@router.post("/v1/classify", tags=["openai"])
async def classify(wire: ClassifyRequest, request: HTTPRequest) -> Response:
    serving = await serving_of(request, wire.model)
    refuse_fields(wire)
    special, info = wire.add_special_tokens is not False, serving.front.info
    requests = await requests_of(wire, wire.input, serving, request, Task.CLASSIFY, special=special)
    many = await results_of(requests, serving, request)

    def entry(index: int, logits: Sequence[float]) -> dict[str, Any]:
        probs = scores_of(info, logits, raw=wire.use_activation is False)
        best = max(range(len(probs)), key=probs.__getitem__)
        label = info.labels[best] if best < len(info.labels) else None
        return {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}

    def answer() -> dict[str, Any]:
        data = [raw(entry(i, logits)) for i, logits in enumerate(many)]
        return listed("classify", data, sum(len(r.prompt_ids) for r in requests), serving, request)

    return await write_json(len(requests) > 256, answer)


@router.post("/pooling", tags=["openai"])
@router.post("/v1/pooling", tags=["openai"])
async def pooling(wire: PoolingRequest, request: HTTPRequest) -> Response:
    serving = await serving_of(request, wire.model)
    refuse_fields(wire)
    front, info = serving.front, serving.front.info
    task = Task(wire.task) if wire.task else next((t for t in info.tasks if t is not Task.GENERATE), Task.EMBED)
    if wire.dimensions is not None and task is not Task.EMBED:
        raise InvalidRequest(f"dimensions of the task {task.value}", "leave it out", param="dimensions")
    check_dimensions(wire.dimensions, info.embedding_size)
    embeds = task in (Task.EMBED, Task.TOKEN_EMBED)
    before, special = front.prompts.of(wire.prompt_name) if embeds else "", wire.add_special_tokens is not False
    requests = await requests_of(wire, wire.input, serving, request, task, special=special, before=before)
    check_values(info, task, requests)
    many, shaped = await results_of(requests, serving, request), _shaper(front, task, wire)

    def entry(index: int, core: Request, values: Sequence[float]) -> dict[str, Any]:
        data = shaped(core.prompt_ids, values)
        if wire.encoding_format == "base64":
            data = base64_of([x for row in data for x in row] if data and not isinstance(data[0], float) else data)
        return {"index": index, "object": "pooling", "data": data}

    def answer() -> dict[str, Any]:
        data = [raw(entry(i, core, values)) for i, (core, values) in enumerate(zip(requests, many, strict=True))]
        return listed("pool", data, sum(len(r.prompt_ids) for r in requests), serving, request)

    return await write_json(len(requests) > 16 or task not in (Task.EMBED, Task.CLASSIFY), answer)


def _shaper(front: Front, task: Task, wire: PoolingRequest) -> Callable[[Sequence[int], Sequence[float]], Any]:
    """What makes the data of a result of its ids and numbers: a list, or one of lists for the results of tokens."""
    info, is_raw = front.info, wire.use_activation is False
    if task is Task.EMBED:
        return lambda ids, values: values if wire.dimensions is None else first_dimensions(values, wire.dimensions)
    if task is Task.CLASSIFY:
        return lambda ids, values: scores_of(info, values, raw=is_raw)
    if task is Task.TOKEN_EMBED:
        return lambda ids, values: token_embeddings(front, ids, values)
    if info.token_weights:
        return lambda ids, values: [[weight] for _, weight in token_weights(front, ids, values)]
    return lambda ids, values: [scores_of(info, row, raw=is_raw) for row in rows_of(values, len(info.labels))]
