"""POST /sglang/generate, which /generate leads to for bodies of SGLang."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.engine.answer import Answer
from kvasir.errors import InvalidRequest
from kvasir.fields import names_in
from kvasir.serve.conversation.drafting import speculation_of
from kvasir.serve.conversation.event_ids import EventIds, with_event_ids
from kvasir.serve.conversation.limits import charge, check_logprobs
from kvasir.serve.conversation.lora_path import PARAM, fields_of_each, for_all
from kvasir.serve.conversation.sampling import asked_fields, sampling_params
from kvasir.serve.conversation.scheduling import scheduling_fields
from kvasir.serve.dialects.sglang.errors import sglang_error
from kvasir.serve.dialects.sglang.shapes import Prompt
from kvasir.serve.dialects.sglang.wire import SamplingSettings, SglangRequest
from kvasir.serve.hosting.catalogue import serving_of
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.asgi import while_connected
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.concurrent import all_of, merge
from kvasir.serve.http.dialect import response_of
from kvasir.serve.http.responses import write_json
from kvasir.serve.http.shared_path import SGLANG
from kvasir.serve.http.sse import DONE, STREAMED, EventStream, event
from kvasir.serve.http.wire import refuse_fields, renamed
from kvasir.types import SamplingParams, StructuredOutputs

router = APIRouter(route_class=JsonRoute, tags=["sglang"])

DEFAULT_MAX_TOKENS = 128
LAST_PRIORITY = 2**31 - 1
# Our fields -> fields of this API.
_NAMES = {
    **{"logprobs": "top_logprobs_num", "prompt_logprobs": "top_logprobs_num"},
    **{ours: f"sampling_params.{theirs}" for ours, theirs in names_in("sglang").items()},
}


@router.post(SGLANG, responses=STREAMED)
async def generate(wire: SglangRequest, request: HTTPRequest) -> Response:
    """Also /generate. A batch, or several choices, gives a list. Each event of a stream has the whole text so far."""
    serving = await serving_of(request, wire.model, adapter=for_all(wire.lora_path), param=PARAM)
    job = await to_job(wire, serving, request)
    cores, ids = with_event_ids(request, serving, [prompt.core for prompt in job.prompts], stream=wire.stream)
    job.prompts = [replace(prompt, core=core) for prompt, core in zip(job.prompts, cores, strict=True)]
    await charge(serving, cores, request, whole=True, names=job.names)
    if wire.stream:
        return EventStream(
            job.events(ids),
            to_response=lambda fault: response_of(fault, request.scope),
            to_event=lambda fault: event(sglang_error(fault)),
            ping=serving.settings.ping,
            numbering=ids,
        )
    answers = await while_connected(request.receive, all_of(serving.front.complete, cores))
    return await write_json(any(prompt.scores for prompt in job.prompts), job.response, answers)


@dataclass(slots=True)
class Job:
    """is_list: the response is a list. names: by which the request can be aborted."""

    serving: Serving
    prompts: list[Prompt]
    is_list: bool
    names: tuple[str, ...]
    begun: float = field(default_factory=time.monotonic)

    def response(self, answers: list[list[Answer]]) -> Any:
        seconds = time.monotonic() - self.begun
        pairs = zip(self.prompts, answers, strict=True)
        found = [prompt.object(answer, seconds) for prompt, each in pairs for answer in each]
        return found if self.is_list else found[0]

    async def events(self, ids: EventIds | None) -> AsyncGenerator[bytes]:
        each = [[Answer(i) for i in range(prompt.core.params.n)] for prompt in self.prompts]
        firsts = [sum(map(len, each[:i])) for i in range(len(each))]
        streams = [self.serving.front.stream(prompt.core, through=ids and ids.through) for prompt in self.prompts]
        async with aclosing(merge(streams, ahead=ids is None)) as deltas:
            async for i, delta in deltas:
                answer = each[i][delta.index]
                answer.add(delta)
                found = self.prompts[i].object(answer, time.monotonic() - self.begun)
                if self.is_list:
                    found["index"] = firsts[i] + delta.index
                yield event(msgspec.json.encode(found))
        yield DONE


async def to_job(wire: SglangRequest, serving: Serving, request: HTTPRequest) -> Job:
    """Raises InvalidRequest."""
    refuse_fields(wire)
    texts, is_batch = _prompts(wire)
    count = len(texts)
    _bound(count, _each(wire.sampling_params, count, "sampling_params"), serving)
    fields = scheduling_fields(wire, serving, request) | speculation_of(wire)
    fields["priority"] = max(-LAST_PRIORITY, -fields["priority"])  # SGLang serves the greatest first
    adapters = await fields_of_each(wire.lora_path, wire.lora, fields, count, serving, request)
    settings = _each(wire.sampling_params, count, "sampling_params")
    scores = _each(wire.return_logprob, count, "return_logprob")
    starts = _each(wire.logprob_start_len, count, "logprob_start_len")
    tops = _each(wire.top_logprobs_num, count, "top_logprobs_num")
    prompts = []
    for i, (text, rid) in enumerate(zip(texts, _rids(wire, count, is_batch), strict=True)):
        given = settings[i] or SamplingSettings()
        refuse_fields(given, "sampling_params")
        start = starts[i] if scores[i] and starts[i] is not None and starts[i] >= 0 else None
        top = (tops[i] or 0) if scores[i] else 0
        check_logprobs(serving, top_logprobs_num=top)
        place = "text" if isinstance(text, str) else "input_ids"
        with renamed({**_NAMES, "prompt": place}):
            ids = await serving.ids_of(text, None, place)
            room = serving.front.info.max_model_len - len(ids)
            params = to_params(given, serving, room, top if scores[i] else None, top if start is not None else None)
            await serving.front.learn(params)
            core = serving.front.resolve(ids, params, **adapters[i])
        prompts.append(Prompt(core, rid, bool(scores[i]), start, top, wire.return_text_in_logprobs))
    is_list = is_batch or any(prompt.core.params.n > 1 for prompt in prompts)
    asked = [wire.rid] if isinstance(wire.rid, str) else wire.rid or ()
    return Job(serving, prompts, is_list, (*asked, *(prompt.rid for prompt in prompts)))


def to_params(
    given: SamplingSettings, serving: Serving, room: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """room: tokens that the context leaves. Raises InvalidRequest."""
    structure = [name for name in ("json_schema", "regex", "ebnf") if getattr(given, name) is not None]
    if len(structure) > 1:
        message = f"{' and '.join(structure)} at once"
        raise InvalidRequest(message, "give one of them", param=f"sampling_params.{structure[1]}")
    return sampling_params(
        asked_fields(given, "sglang") | {"n": given.n or 1, "structured_outputs": _structure(given)},
        serving.front.info,
        serving.own,
        max_tokens=max(1, min(DEFAULT_MAX_TOKENS, room)) if given.max_new_tokens is None else given.max_new_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _structure(given: SamplingSettings) -> StructuredOutputs | None:
    if given.json_schema is not None:
        return StructuredOutputs(json=given.json_schema)
    if given.regex is not None:
        return StructuredOutputs(regex=given.regex)
    return None if given.ebnf is None else StructuredOutputs(grammar=given.ebnf)


def _prompts(wire: SglangRequest) -> tuple[Sequence[str | list[int]], bool]:
    """The single prompts, and whether they are a batch. Raises InvalidRequest."""
    if (wire.text is None) == (wire.input_ids is None):
        raise InvalidRequest("expected one of text and input_ids", "give one of them", param="text")
    if wire.text is not None:
        found = [wire.text] if isinstance(wire.text, str) else list(wire.text)
        if not found or not all(found):
            raise InvalidRequest("`text` is empty", "give a prompt", param="text")
        return found, not isinstance(wire.text, str)
    ids: Any = wire.input_ids
    return (ids, True) if isinstance(ids[0], list) else ([ids], False)


def _bound(count: int, settings: Sequence[SamplingSettings | None], serving: Serving) -> None:
    """Raises InvalidRequest for more prompts or choices than the server takes at once."""
    choices, limits = sum((given and given.n) or 1 for given in settings), serving.settings
    if count > limits.max_prompts or choices > limits.max_answers:
        most = f"at most {limits.max_prompts} prompts and {limits.max_answers} choices"
        raise InvalidRequest(f"{count} prompts with {choices} choices", most, param="text")


def _each(value: Any, count: int, name: str) -> list[Any]:
    """The value for each prompt: one for all, or one for each. Raises InvalidRequest."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{len(value)} values for {count} prompts", "give one for each", param=name)
    return list(value)


def _rids(wire: SglangRequest, count: int, is_batch: bool) -> list[str]:
    """The name of each prompt: the client's, in a batch with a number, or a new one. Raises InvalidRequest."""
    if isinstance(wire.rid, list):
        return _each(wire.rid, count, "rid")
    own = wire.rid or secrets.token_hex(16)
    return [f"{own}_{i}" for i in range(count)] if is_batch else [own]
