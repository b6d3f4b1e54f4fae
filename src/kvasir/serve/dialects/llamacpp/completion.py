"""POST /completion, /completions and /infill"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.engine.answer import TextDelta
from kvasir.errors import InvalidRequest
from kvasir.serve.conversation.drafting import speculation_of
from kvasir.serve.conversation.event_ids import EventIds, with_event_ids
from kvasir.serve.conversation.limits import charge, check_logprobs
from kvasir.serve.conversation.outcome import check_finish
from kvasir.serve.conversation.progress import check_numbering, progress_object
from kvasir.serve.conversation.scheduling import scheduling_fields
from kvasir.serve.dialects.llamacpp.errors import llamacpp_error
from kvasir.serve.dialects.llamacpp.lines import Lines
from kvasir.serve.dialects.llamacpp.params import names_of, to_params
from kvasir.serve.dialects.llamacpp.shapes import ChoiceState, final_object, partial_object
from kvasir.serve.dialects.llamacpp.wire import CompletionRequest, InfillRequest, Options, one_by_one
from kvasir.serve.hosting.catalogue import serving_of
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.asgi import while_connected
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.concurrent import merge
from kvasir.serve.http.faults import Fault
from kvasir.serve.http.responses import write_json
from kvasir.serve.http.sse import STREAMED, EventStream, event
from kvasir.serve.http.wire import refuse_fields, renamed
from kvasir.types import Request, SamplingParams

router = APIRouter(route_class=JsonRoute, tags=["llama.cpp"])

NO_PING = 1e9  # seconds


@router.post("/completion", responses=STREAMED)
async def completion(wire: CompletionRequest, request: HTTPRequest) -> Response:
    """Returns a list for several prompts, or for several choices of one."""
    serving = await serving_of(request, wire.model)
    given = one_by_one(wire.prompt)
    if len(given) > serving.settings.max_prompts:
        raise InvalidRequest(f"{len(given)} prompts", f"at most {serving.settings.max_prompts}", param="prompt")
    prompts = [(await prompt_ids(prompt, serving), ()) for prompt in given]
    return await _answer(wire, prompts, serving, request)


@router.post("/completions", responses=STREAMED)
async def completions(wire: CompletionRequest, request: HTTPRequest) -> Response:
    """The same as /completion."""
    return await completion(wire, request)


@router.post("/infill", responses=STREAMED)
async def infill(wire: InfillRequest, request: HTTPRequest) -> Response:
    """Generates the text between input_prefix and input_suffix, for models with fill-in-the-middle tokens. The sampler
    `infill` is accepted and has no effect."""
    serving = await serving_of(request, wire.model)
    files = [(file.filename, file.text) for file in wire.input_extra or ()]
    before = wire.input_prefix + (wire.prompt or "")
    prompt = await serving.front.encode_infill(before, wire.input_suffix, files=files, param="input_suffix")
    return await _answer(wire, [prompt], serving, request)


async def _answer(
    wire: Options, prompts: Sequence[tuple[Sequence[int], Sequence[int]]], serving: Serving, request: HTTPRequest
) -> Response:
    """prompts: per prompt, its ids and the ids that end a choice."""
    requests = await to_requests(wire, prompts, serving, request)
    requests, ids = with_event_ids(request, serving, requests, stream=bool(wire.stream), prefix="cmpl-")
    check_numbering(wire.return_progress, ids)
    await charge(serving, requests, request, whole=not wire.stream)
    job = LlamaCppJob(wire, serving, requests, ids)
    if not wire.stream:
        await while_connected(request.receive, job.run())
        return await write_json(True, job.response)
    ping = {None: serving.settings.ping, -1: NO_PING}.get(wire.sse_ping_interval, float(wire.sse_ping_interval or 1))
    return EventStream(job.events(), to_response=error_response, to_event=error_event, ping=ping, numbering=ids)


def error_response(fault: Fault) -> Response:
    return Response(llamacpp_error(fault), fault.status, fault.headers, "application/json")


def error_event(fault: Fault) -> bytes:
    return event(llamacpp_error(fault))


# -- to_requests -------------------------------------------------------------------------------------------


async def prompt_ids(prompt: Any, serving: Serving, param: str = "prompt") -> Sequence[int]:
    """The ids of a single prompt. A prompt that begins with a text gets the tokenizer's special tokens. Raises
    InvalidRequest."""
    if isinstance(prompt, dict):
        if prompt.get("multimodal_data"):
            raise InvalidRequest("multimodal_data is not supported", "this model reads text", param=param)
        prompt = prompt["prompt_string"]
    if isinstance(prompt, str):
        return await serving.front.encode(prompt, param=param)
    ids: list[int] = []
    for i, piece in enumerate(prompt):
        if isinstance(piece, str):
            ids += await serving.front.encode(piece, add_special_tokens=i == 0, param=param) if piece else ()
        else:
            ids.append(piece)
    return ids


async def to_requests(
    wire: Options, prompts: Sequence[tuple[Sequence[int], Sequence[int]]], serving: Serving, request: HTTPRequest
) -> list[Request]:
    """One request of the core per prompt. Raises InvalidRequest for unsupported requests."""
    front, settings = serving.front, serving.settings
    refuse_fields(wire)
    check_logprobs(serving, n_probs=wire.n_probs)
    if len(prompts) * (wire.n_cmpl or 1) > settings.max_answers:
        raise InvalidRequest(f"n_cmpl is {wire.n_cmpl}", f"at most {settings.max_answers} choices", param="n_cmpl")
    fields = scheduling_fields(wire, serving, request) | speculation_of(wire, wire.speculative_n_max)
    fields["no_cache"] = fields["no_cache"] or wire.cache_prompt is False
    fields["progress"] = bool(wire.stream and wire.return_progress)
    with renamed(names_of(wire)):
        size = sum(len(token) for token, _ in wire.logit_bias or () if isinstance(token, str))
        biases, never = await front.in_turn(size, partial(_biases, wire, serving))
        params = to_params(wire, front.info, serving.own, isinstance(wire, InfillRequest))
        params = replace(params, logit_bias=biases)
        await front.learn(params)
        requests = []
        for ids, ends in prompts:
            fitted = _fit(params, len(ids), front.info.max_model_len)
            core = front.resolve(ids, fitted, id=f"cmpl-{secrets.token_hex(12)}", **fields)
            eos = tuple(dict.fromkeys((*(core.eos_ids or ()), *ends))) or None
            words = (*core.bad_word_ids, *((token,) for token in never))
            requests.append(replace(core, eos_ids=eos, bad_word_ids=words))
    return requests


def _fit(params: SamplingParams, prompt_tokens: int, context: int) -> SamplingParams:
    """Limits max_tokens to what the context leaves."""
    if params.max_tokens is None:
        return params
    return replace(params, max_tokens=max(1, min(params.max_tokens, context - prompt_tokens)))


def _biases(wire: Options, serving: Serving) -> tuple[dict[int, float], set[int]]:
    """Biases by token id, and the ids that must never be sampled. A text stands for each of its tokens. Raises
    InvalidRequest."""
    biases: dict[int, float] = {}
    never: set[int] = set()
    for token, bias in wire.logit_bias or ():
        for id in _tokens(token, serving):
            if not 0 <= id < serving.front.info.vocab_size:
                expected = f"expected [0, {serving.front.info.vocab_size})"
                raise InvalidRequest(f"logit_bias names token {id}", expected, param="logit_bias")
            if bias is False:
                never.add(id)
            else:
                biases[id] = float(bias)
    return biases, never


def _tokens(token: int | str, serving: Serving) -> Sequence[int]:
    if isinstance(token, int):
        return (token,)
    if token.isascii() and token.isdigit() and len(token) < 11:
        return (int(token),)
    tokenizer = serving.front.tokenizer
    if tokenizer is None:
        raise InvalidRequest("this model has no tokenizer", "give token ids", param="logit_bias")
    return tokenizer.encode(token, add_special_tokens=False)


# -- responses ---------------------------------------------------------------------------------------------


class LlamaCppJob:
    """One HTTP request: its prompts, and how their choices are encoded. Choice j of prompt i has the number i * n +
    j."""

    def __init__(self, wire: Options, serving: Serving, requests: list[Request], ids: EventIds | None = None):
        self._ids = ids
        self.wire = wire
        self.serving = serving
        self.requests = requests
        n = requests[0].params.n
        limit = wire.t_max_predict_ms or 0
        seconds = limit / 1000 if limit > 0 else None
        self.choices = [
            ChoiceState(i * n + j, core, Lines(wire.n_indent or 0, seconds))
            for i, core in enumerate(requests)
            for j in range(n)
        ]

    @property
    def only_prompt(self) -> bool:
        return self.wire.n_predict == 0

    async def run(self) -> None:
        """Runs all choices to their ends."""
        async with aclosing(self._deltas()) as deltas:
            async for _ in deltas:
                pass

    def response(self) -> Any:
        results = [final_object(self.wire, self.serving, choice, whole=True) for choice in self.choices]
        return results if len(results) > 1 else results[0]

    async def events(self) -> AsyncGenerator[bytes]:
        async with aclosing(self._deltas()) as deltas:
            async for choice, text, delta in deltas:
                objects = []
                if delta.progress is not None and not choice.usage.completion_tokens:
                    found = partial_object(self.wire, choice, "", delta)
                    objects.append(found | {"prompt_progress": progress_object(delta)})
                if not self.only_prompt and (text or delta.token_ids):
                    objects.append(partial_object(self.wire, choice, text, delta))
                if choice.stop_type:  # in a thread, since it decodes the prompt
                    objects.append(await asyncio.to_thread(final_object, self.wire, self.serving, choice, whole=False))
                if objects:
                    yield b"".join(event(msgspec.json.encode(o)) for o in objects)

    async def _deltas(self) -> AsyncGenerator[tuple[ChoiceState, str, TextDelta]]:
        """The text to send for each delta. A choice that Lines ends is aborted there."""
        streams = [self.serving.front.stream(core, through=self._ids and self._ids.through) for core in self.requests]
        left = len(self.choices)
        async with aclosing(merge(streams, ahead=self._ids is None)) as deltas:
            async for i, delta in deltas:
                core = self.requests[i]
                choice = self.choices[i * core.params.n + delta.index]
                if choice.stop_type:
                    continue
                check_finish(delta, core.id)
                text = choice.add(delta, self.only_prompt)
                if choice.stop_type:
                    left -= 1
                    if not delta.finish_reason:
                        id = self._ids.engine_ids[core.id] if self._ids else core.id
                        await self.serving.front.engine.abort(id, delta.index)
                yield choice, text, delta
                if not left:
                    return
