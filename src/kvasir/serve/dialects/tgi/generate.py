"""POST /generate, /generate_stream and /, and GET /info"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir import __version__
from kvasir.errors import InvalidRequest
from kvasir.fields import MAX_N, MAX_STOP_STRINGS, names_in
from kvasir.serve.conversation.drafting import speculation_of
from kvasir.serve.conversation.event_ids import EventIds, with_event_ids
from kvasir.serve.conversation.limits import charge, check_logprobs
from kvasir.serve.conversation.ranking import best
from kvasir.serve.conversation.sampling import asked_fields, sampling_params
from kvasir.serve.conversation.scheduling import scheduling_fields
from kvasir.serve.dialects.tgi.errors import tgi_error
from kvasir.serve.dialects.tgi.shapes import TokenStream, generated
from kvasir.serve.dialects.tgi.wire import CompatGenerateRequest, GenerateRequest, Grammar, Parameters
from kvasir.serve.hosting.catalogue import loaded_of, serving_of
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.asgi import while_connected
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.dialect import response_of
from kvasir.serve.http.responses import json_response, write_json
from kvasir.serve.http.sse import STREAMED, EventStream, event
from kvasir.serve.http.wire import refuse_fields, renamed
from kvasir.types import Request, SamplingParams, StructuredOutputs

router = APIRouter(route_class=JsonRoute, tags=["tgi"])

DEFAULT_MAX_TOKENS = 100
_ADAPTER = "parameters.adapter_id"
_SAMPLING = ("temperature", "top_k", "top_p", "typical_p")  # any of them turns sampling on
# Our fields -> fields of this API.
_NAMES = {
    **{"prompt": "inputs", "structured_outputs": "parameters.grammar"},
    **{ours: f"parameters.{theirs}" for ours, theirs in names_in("tgi").items()},
}


@router.post("/generate")
async def generate(wire: GenerateRequest, request: HTTPRequest) -> Response:
    given = wire.parameters or Parameters()
    serving = await serving_of(request, wire.model, adapter=given.adapter_id, param=_ADAPTER)
    core = await to_request(wire, given, serving, request)
    with_event_ids(request, serving, [core], stream=False)
    await charge(serving, [core], request, whole=True)
    answers = await while_connected(request.receive, serving.front.complete(core))
    ranked = best(answers, len(answers), always=True)
    shape = (ranked, core, _prefix(wire, given), bool(given.details), _special_ids(serving))
    return await write_json(bool(given.details), generated, *shape)


@router.post("/generate_stream", responses=STREAMED)
async def generate_stream(wire: GenerateRequest, request: HTTPRequest) -> Response:
    """One event per token; the last one has the whole text and, with `details`, the finish reason."""
    given = wire.parameters or Parameters()
    serving = await serving_of(request, wire.model, adapter=given.adapter_id, param=_ADAPTER)
    for name, value in (("best_of", (given.best_of or 1) > 1), ("decoder_input_details", given.decoder_input_details)):
        if value:
            raise InvalidRequest(f"{name} cannot be streamed", "use /generate", param=f"parameters.{name}")
    core = await to_request(wire, given, serving, request)
    [core], ids = with_event_ids(request, serving, [core], stream=True)
    await charge(serving, [core], request, whole=False)
    return EventStream(
        _events(wire, given, core, serving, ids),
        to_response=lambda fault: response_of(fault, request.scope),
        to_event=lambda fault: event(tgi_error(fault)),
        ping=serving.settings.ping,
        numbering=ids,
    )


@router.post("/", responses=STREAMED)
async def generate_either(wire: CompatGenerateRequest, request: HTTPRequest) -> Response:
    """As /generate_stream if `stream` is set, otherwise as /generate, but in a list."""
    if wire.stream:
        return await generate_stream(wire, request)
    response = await generate(wire, request)
    return Response(b"[" + bytes(response.body) + b"]", media_type="application/json")


@router.get("/info")
async def info(request: HTTPRequest, model: str | None = None) -> Response:
    """Facts about the model in ?model=, by default about the first loaded model."""
    serving = await loaded_of(request, model)
    settings, model_info = serving.settings, serving.front.info
    return json_response(
        {
            "model_id": serving.names[0],
            "model_sha": None,
            "model_pipeline_tag": "text-generation",
            "model_dtype": model_info.dtype,
            "model_device_type": model_info.device,
            "max_concurrent_requests": settings.max_connections,
            "max_best_of": MAX_N,
            "max_stop_sequences": MAX_STOP_STRINGS,
            "max_input_tokens": model_info.max_model_len - 1,
            "max_total_tokens": model_info.max_model_len,
            "validation_workers": 1,
            "max_client_batch_size": 1,
            "router": "kvasir",
            "version": __version__,
            "sha": None,
            "docker_label": None,
        }
    )


async def to_request(wire: GenerateRequest, given: Parameters, serving: Serving, request: HTTPRequest) -> Request:
    """The engine's request. Raises InvalidRequest."""
    refuse_fields(given, "parameters")
    check_logprobs(serving, **{"parameters.top_n_tokens": given.top_n_tokens})
    front = serving.front
    if not wire.inputs:
        raise InvalidRequest("`inputs` is empty", "give a prompt", param="inputs")
    ids = await front.encode(wire.inputs, param="inputs", bound="count" if given.truncate else "context")
    ids = ids[-given.truncate :] if given.truncate else ids
    with renamed(_NAMES):
        params = to_params(given, serving, front.info.max_model_len - len(ids))
        await front.learn(params)
        fields = scheduling_fields(wire, serving, request) | speculation_of(wire)
        return front.resolve(ids, params, param="inputs", **fields)


def to_params(given: Parameters, serving: Serving, room: int) -> SamplingParams:
    """room: tokens that the context leaves. Raises InvalidRequest."""
    samples = given.do_sample or any(getattr(given, name) is not None for name in _SAMPLING)
    count = given.best_of or 1
    if count > 1 and (not samples or given.seed is not None):
        message = "best_of needs sampling, and no seed"
        raise InvalidRequest(message, "give a temperature and leave out seed", param="parameters.best_of")
    asked = asked_fields(given, "tgi")
    if not samples:
        asked["temperature"] = 0.0
    if given.stop is not None:
        asked["include_stop_str_in_output"] = True
    return sampling_params(
        asked | {"n": count, "structured_outputs": _structure(given.grammar)},
        serving.front.info,
        serving.own,
        max_tokens=max(1, min(DEFAULT_MAX_TOKENS, room)) if given.max_new_tokens is None else given.max_new_tokens,
        logprobs=given.top_n_tokens or 0,
        prompt_logprobs=0 if given.decoder_input_details else None,
    )


def _structure(grammar: Grammar | None) -> StructuredOutputs | None:
    if grammar is None:
        return None
    if grammar.type == "regex":
        if not isinstance(grammar.value, str):
            raise InvalidRequest("a regular expression must be a string", "give a string", param="parameters.grammar")
        return StructuredOutputs(regex=grammar.value)
    schema = grammar.value
    if grammar.type == "json_schema" and isinstance(schema, dict):
        schema = schema.get("schema", schema)
    return StructuredOutputs(json=schema)


def _prefix(wire: GenerateRequest, given: Parameters) -> str:
    return wire.inputs if given.return_full_text else ""


def _special_ids(serving: Serving) -> frozenset[int]:
    return serving.front.tokenizer.special_ids if serving.front.tokenizer else frozenset()


async def _events(
    wire: GenerateRequest, given: Parameters, core: Request, serving: Serving, ids: EventIds | None
) -> AsyncGenerator[bytes]:
    tokens = TokenStream(core, _prefix(wire, given), _special_ids(serving))
    async with aclosing(serving.front.stream(core, through=ids and ids.through)) as deltas:
        async for delta in deltas:
            if found := [event(msgspec.json.encode(token)) for token in tokens.push(delta)]:
                yield b"".join(found)
