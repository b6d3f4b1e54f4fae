"""POST /api/generate"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.engine.front import Front
from kvasir.engine.thinking import may_think
from kvasir.errors import InvalidRequest
from kvasir.serve.conversation.drafting import speculation_of
from kvasir.serve.conversation.limits import check_logprobs
from kvasir.serve.conversation.scheduling import scheduling_fields
from kvasir.serve.conversation.trust import trust_of
from kvasir.serve.dialects.ollama.answer import Clock, OllamaJob, as_response
from kvasir.serve.dialects.ollama.asking import answer
from kvasir.serve.dialects.ollama.params import (
    check_fits,
    context_of,
    drafted_of,
    options_of,
    room_for_answer,
    to_params,
)
from kvasir.serve.dialects.ollama.prompt import cut_ids, must_be_kept_from_thinking, thinking_variables
from kvasir.serve.dialects.ollama.route import STREAMED
from kvasir.serve.dialects.ollama.wire import GenerateRequest
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.wire import refuse_fields
from kvasir.store.templates import PROBE, check_probe, check_source, no_template_errors

router = APIRouter(route_class=JsonRoute)

_KEPT = 4  # leading ids that a truncated prompt keeps, unless num_keep is given


@router.post("/api/generate", tags=["ollama"], responses=STREAMED)
async def generate(wire: GenerateRequest, request: HTTPRequest) -> Response:
    _refuse(wire)
    return await answer(wire, request, as_response, to_job if wire.prompt or wire.suffix else None)


def _refuse(wire: GenerateRequest) -> None:
    refuse_fields(wire)
    for name in ("template", "system", "context", "think"):
        if wire.raw and getattr(wire, name):
            raise InvalidRequest(f"raw mode does not support {name}", "leave one of them out", name)
    for name in ("template", "system", "context", "raw", "think", "truncate"):
        if wire.suffix and getattr(wire, name):
            raise InvalidRequest(f"filling in the middle does not support {name}", "leave one of them out", name)
    if (wire.raw or wire.suffix) and wire.trust_special_tokens is not None:
        name = "trust_special_tokens"
        raise InvalidRequest(f"{name} applies to conversations; this prompt is used as it is", "leave it out", name)


async def to_job(wire: GenerateRequest, serving: Serving, request: HTTPRequest, clock: Clock) -> OllamaJob:
    """The job of a request. Raises InvalidRequest for unsupported requests, TemplateError."""
    front, entry = serving.front, serving.entry
    check_logprobs(serving, top_logprobs=wire.top_logprobs)
    options = options_of(wire.options, entry.parameters if entry else {})
    context = context_of(options, front.info)
    if not (wire.raw or wire.suffix) and must_be_kept_from_thinking(wire.think, front, None):
        options = options.model_copy(update={"thinking_token_budget": 0})
    ids: Sequence[int]
    ends: tuple[int, ...] = ()
    cut = 0
    if wire.suffix:
        ids, ends = await front.encode_infill(wire.prompt or "", wire.suffix)
    else:
        ids = await prompt_ids(wire, serving, trust_of(wire, serving, request))
    if wire.truncate:
        keep = _KEPT if options.num_keep is None else options.num_keep
        ids, cut = cut_ids(ids, context - room_for_answer(options, context), keep)
    check_fits(len(ids), context, "prompt")
    params = to_params(wire, options, front.info, context - len(ids))
    reading = None if wire.raw or wire.suffix else front.reader.reading(ids, None, await _thinks(wire, front))
    fields = scheduling_fields(wire, serving, request) | speculation_of(wire, drafted_of(options))
    if reading is not None:
        grammar = await front.grammars.later(front.grammars.answer, reading, params)
        if grammar is not None:  # the grammar lets the model think first
            params = replace(params, structured_outputs=None)
            fields["grammar"] = grammar
    await front.learn(params)
    core = front.resolve(ids, params, param="prompt", **fields)
    if ends:
        core = replace(core, eos_ids=(*(core.eos_ids or ()), *ends))
    truncated = {"tokens": cut} if cut else {}
    return OllamaJob(
        wire.model, serving, core, reading, clock, as_response, truncated, with_context=not (wire.raw or wire.suffix)
    )


async def _thinks(wire: GenerateRequest, front: Front) -> bool:
    if wire.template or wire.format is None:
        return True
    variables = thinking_variables(wire.think, front, None, wire.model)
    return await may_think(front, [{"role": "user", "content": wire.prompt or ""}], variables=variables)


async def prompt_ids(wire: GenerateRequest, serving: Serving, trust: bool | None = None) -> tuple[int, ...]:
    """The ids of the prompt: unchanged if it is raw or the model has no template, otherwise of a chat with one
    message."""
    front, prompt = serving.front, wire.prompt or ""
    bare = not wire.template and not (front.template and front.template.sources)
    if wire.raw or bare:
        if wire.system or wire.think:
            name = "system" if wire.system else "think"
            raise InvalidRequest(f"this model has no chat template, which {name} needs", "leave it out", name)
        ids = await front.encode(prompt, bound="count" if wire.truncate else "context")
    else:
        ids = await _chat_ids(wire, serving, prompt, trust)
    if wire.context is None:
        return ids
    bos = front.tokenizer.bos_id if front.tokenizer else None
    return (*wire.context, *(ids[1:] if wire.context and ids[0] == bos else ids))


async def _chat_ids(wire: GenerateRequest, serving: Serving, prompt: str, trust: bool | None) -> tuple[int, ...]:
    front, entry = serving.front, serving.entry
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": prompt}]
    if entry and not wire.context:
        messages = [m for m in entry.conversation(messages) if not (wire.system and m.get("role") == "system")]
    if wire.system:
        messages.insert(0, {"role": "system", "content": wire.system})
    variables = {} if wire.template else thinking_variables(wire.think, front, None, wire.model)
    if not wire.template:
        return await front.encode_chat(
            messages, variables=variables, trust_special_tokens=trust, bound="count" if wire.truncate else "context"
        )
    if wire.think is not None:
        raise InvalidRequest("think needs the model's own template", "leave one of them out", "think")
    check_source(wire.template)
    with no_template_errors():
        check_probe((await front.render_chat(PROBE, chat_template=wire.template)).text)
    return await front.encode_chat(
        messages, chat_template=wire.template, trust_special_tokens=trust, bound="count" if wire.truncate else "context"
    )
