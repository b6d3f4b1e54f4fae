"""llama.cpp's routes for server properties, templates and embeddings: /props, /slots, /lora-adapters, /apply-template,
/embedding"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, Literal

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir import __version__
from kvasir.engine.client import ASLEEP
from kvasir.engine.scoring import token_embeddings
from kvasir.errors import EngineDead, InvalidRequest
from kvasir.serve.auth.scopes import MANAGEMENT
from kvasir.serve.conversation.chat_format import to_messages, to_tools
from kvasir.serve.conversation.limits import charge, check_values
from kvasir.serve.conversation.messages import Conversation
from kvasir.serve.conversation.request import prompt_text
from kvasir.serve.conversation.scheduling import scheduling_fields
from kvasir.serve.conversation.thinking import effort_variables
from kvasir.serve.dialects.llamacpp.completion import prompt_ids
from kvasir.serve.dialects.llamacpp.params import RANDOM_SEEDS, n_predict_of, settings_object, to_params
from kvasir.serve.dialects.llamacpp.wire import AdapterScale, EmbeddingRequest, Options, TemplateRequest, one_by_one
from kvasir.serve.hosting.catalogue import loaded_of, serving_of
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.asgi import while_connected
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.concurrent import all_of
from kvasir.serve.http.responses import json_response, write_json
from kvasir.serve.http.vectors import raw
from kvasir.snapshot import AnswerState
from kvasir.types import Request, Task

router = APIRouter(route_class=JsonRoute, tags=["llama.cpp"])

INT16 = 32760.0  # llama.cpp scales the greatest value to this


# -- the server --------------------------------------------------------------------------------------------


@router.get("/props")
async def props(request: HTTPRequest, model: str | None = None) -> Response:
    """The properties of the model in ?model=, by default of the first loaded model."""
    serving = await loaded_of(request, model)
    front = serving.front
    snapshot = await serving.lookout.look()
    template = front.template.sources.get("default", "") if front.template else ""
    special = front.tokenizer.special_tokens if front.tokenizer else {}
    return json_response(
        {
            "default_generation_settings": {**_slot(0, None, serving), "params": _defaults(serving), "prompt": ""},
            "total_slots": snapshot.rows,
            "model_alias": serving.names[0],
            "model_path": serving.names[0],
            "chat_template": template,
            "chat_template_caps": {},
            "bos_token": special.get("bos_token", ""),
            "eos_token": special.get("eos_token", ""),
            "modalities": {"vision": False, "audio": False},
            "build_info": f"kvasir-{__version__}",
            "is_sleeping": front.engine.state.status == ASLEEP,
        }
    )


@router.get("/slots")
async def slots(request: HTTPRequest, model: str | None = None, fail_on_no_slot: str | None = None) -> Response:
    """The rows of the engine, with the progress of each choice but none of its text. 503 with ?fail_on_no_slot=1 if no
    row is free."""
    serving = await loaded_of(request, model)
    snapshot = await serving.lookout.look()
    rows = {answer.row: answer for answer in snapshot.answers if answer.row >= 0}
    if fail_on_no_slot not in (None, "", "0") and len(rows) >= snapshot.rows:
        raise EngineDead("no slot is available", "try again")
    return json_response([_slot(row, rows.get(row), serving) for row in range(snapshot.rows)])


@router.post("/props")
async def change_props(properties: dict[str, Any]) -> Response:
    """Refused: there are no properties that can be changed."""
    for name in properties:
        message = f"the property {name[:80]!r} cannot be changed"
        raise InvalidRequest(message, "set it when the server starts", param=name[:80])
    return json_response({"success": True})


@router.post("/slots/{id_slot}")
async def change_slot(id_slot: int, action: Literal["save", "restore", "erase"]) -> Response:
    """Refused: all prompts share one prefix cache, and rows of the engine have no caches of their own."""
    message = f"slot {id_slot} has no cache of its own to {action}: all prompts share one"
    raise InvalidRequest(message, 'send "cache_prompt": false to leave nothing in it', param="action")


@router.get("/lora-adapters")
async def adapters(request: HTTPRequest, model: str | None = None) -> Response:
    """The adapters of the model in ?model=, by default of the first loaded model. scale: for requests that select no
    adapter."""
    shelf = (await loaded_of(request, model)).front.adapters
    return json_response(
        [
            {"id": i, "path": PurePath(info.path).name, "scale": shelf.default(info.name), "name": info.name}
            | ({"alora_invocation_tokens": info.invocation} if info.invocation else {})
            for i, info in enumerate(shelf.known)
        ]
    )


@router.post("/lora-adapters", tags=[MANAGEMENT])
async def scale_adapters(adapters: list[AdapterScale], request: HTTPRequest, model: str | None = None) -> Response:
    """Sets the scales for requests that select no adapter; adapters that are not in the list get 0."""
    shelf = (await loaded_of(request, model)).front.adapters
    shelf.set_defaults({one.id: one.scale for one in adapters})
    return json_response({"success": True})


def _slot(row: int, answer: AnswerState | None, serving: Serving) -> dict[str, Any]:
    decoded = max(0, answer.known - answer.prompt) if answer else 0
    return {
        "id": row,
        "id_task": -1,
        "n_ctx": serving.front.info.max_model_len,
        "speculative": bool(serving.front.info.drafters),
        "is_processing": answer is not None,
        "n_prompt_tokens": answer.prompt if answer else 0,
        "n_prompt_tokens_cache": answer.cached if answer else 0,
        "next_token": {"has_next_token": answer is not None, "n_remain": -1, "n_decoded": decoded},
    }


def _defaults(serving: Serving) -> dict[str, Any]:
    """The settings of a request without options."""
    wire = Options()
    params = to_params(wire, serving.front.info, serving.own)
    known = serving.front.adapters.known
    lora = [{"id": known.index(one), "scale": scale} for one, scale in serving.front.adapters.effective(None)]
    found = settings_object(wire, params, n_predict_of(wire, serving.own), serving.front.info, lora=lora)
    return found | ({"seed": RANDOM_SEEDS[-1]} if params.seed is None else {})


# -- templates and embeddings ------------------------------------------------------------------------------


@router.post("/apply-template")
async def apply_template(wire: TemplateRequest, request: HTTPRequest) -> Response:
    serving = await serving_of(request, wire.model)
    text, foreign = await prompt_text(_conversation(wire, serving), serving)
    return json_response({"prompt": text, "foreign": foreign})


def _conversation(wire: TemplateRequest, serving: Serving) -> Conversation:
    tools = to_tools(wire.tools)
    variables = effort_variables(wire.reasoning_effort, serving.front, tools.shown)
    return Conversation(
        serving.conversation(to_messages(wire.messages, serving.front, tools)),
        tools,
        variables | (wire.chat_template_kwargs or {}),
        add_generation_prompt=wire.add_generation_prompt is not False,
        continue_final_message=bool(wire.continue_final_message),
    )


@router.post("/embedding")
async def embedding(wire: EmbeddingRequest, request: HTTPRequest) -> Response:
    """Embeddings: a list of one for each input, or with `pooling` "none" one of each of its tokens."""
    serving = await serving_of(request, wire.model)
    given, most = one_by_one(wire.content), serving.settings.max_embeddings
    if len(given) > most:
        raise InvalidRequest(f"{len(given)} inputs", f"at most {most}", param="content")
    fields = scheduling_fields(wire, serving, request)
    ids = [await prompt_ids(one, serving, "content") for one in given]
    task, front = Task.TOKEN_EMBED if wire.pooling else Task.EMBED, serving.front
    requests = [front.resolve_pooled(one, task, param="content", **fields) for one in ids]
    check_values(front.info, task, requests, "content")
    await charge(serving, requests, request, whole=False)
    vectors = await while_connected(request.receive, all_of(serving.front.embed, requests))
    norm = 2 if wire.embd_normalize is None and not wire.pooling else wire.embd_normalize

    def rows(core: Request, values: Sequence[float]) -> list[Any]:
        found = token_embeddings(front, core.prompt_ids, values) if wire.pooling else [values]
        return [raw(row if norm is None else normalized(row, norm)) for row in found]

    def answer() -> list[dict[str, Any]]:
        pairs = enumerate(zip(requests, vectors, strict=True))
        return [{"index": i, "embedding": rows(core, values)} for i, (core, values) in pairs]

    return await write_json(len(requests) > 16 or wire.pooling is not None, answer)


@router.post("/embeddings")
async def embeddings(wire: EmbeddingRequest, request: HTTPRequest) -> Response:
    """The same as /embedding."""
    return await embedding(wire, request)


def normalized(vector: Sequence[float], norm: int) -> list[float]:
    """The vector, scaled to a p-norm of 1; with p = 0, to a greatest magnitude of INT16."""
    greatest = max(map(abs, vector), default=0.0)
    if not greatest:
        return list(vector)
    scaled = [x / greatest for x in vector]  # to avoid overflow in powers
    if norm == 0:
        return [x * INT16 for x in scaled]
    size = sum(abs(x) ** norm for x in scaled) ** (1 / norm)
    return [x / size for x in scaled]
