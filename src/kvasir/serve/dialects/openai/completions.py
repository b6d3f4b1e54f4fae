"""POST /v1/completions

With a suffix the choice fills the gap between prompt and suffix, for models that have tokens for that. best_of choices
are generated, and the n whose tokens have the highest mean log-probability are returned.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.engine.answer import Answer, TextDelta, TokenInfo, prompt_text
from kvasir.errors import InvalidRequest
from kvasir.fields import MAX_N
from kvasir.serve.conversation.drafting import speculation_of
from kvasir.serve.conversation.event_ids import EventIds, with_event_ids
from kvasir.serve.conversation.limits import charge, check_logprobs
from kvasir.serve.conversation.lora_path import PARAM, fields_of_each, for_all
from kvasir.serve.conversation.outcome import check_finish
from kvasir.serve.conversation.progress import check_numbering, progress_object
from kvasir.serve.conversation.ranking import best
from kvasir.serve.conversation.scheduling import scheduling_fields
from kvasir.serve.dialects.openai.extensions import truncated
from kvasir.serve.dialects.openai.params import check_stream_options, to_params
from kvasir.serve.dialects.openai.shapes import (
    Chunks,
    Timings,
    completion_logprobs,
    error_event,
    error_response,
    head_object,
    prompt_logprobs,
    usage_object,
)
from kvasir.serve.dialects.openai.structured import named
from kvasir.serve.dialects.openai.transfer import transfer_fields, transfer_object
from kvasir.serve.dialects.openai.wire import CompletionRequest
from kvasir.serve.hosting.catalogue import serving_of
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.asgi import while_connected
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.concurrent import all_of, merge
from kvasir.serve.http.responses import write_json
from kvasir.serve.http.sse import DONE, STREAMED, EventStream
from kvasir.serve.http.wire import prompt_list, refuse_fields
from kvasir.types import FinishReason, Request, SamplingParams, Usage

router = APIRouter(route_class=JsonRoute)

DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions", tags=["openai"], responses=STREAMED)
async def completions(wire: CompletionRequest, request: HTTPRequest) -> Response:
    serving = await serving_of(request, wire.model, adapter=for_all(wire.lora_path), param=PARAM)
    begun = time.monotonic()
    prompts = await to_requests(wire, serving, request)
    prompts, ids = with_event_ids(request, serving, prompts, stream=bool(wire.stream), prefix="cmpl-")
    job = CompletionJob(wire, serving, f"cmpl-{secrets.token_hex(12)}", int(time.time()), prompts, begun)
    job = job if ids is None else replace(job, id=ids.id, created=ids.created)
    check_numbering(wire.return_progress, ids)
    await charge(serving, prompts, request, whole=not wire.stream, names=(job.id,))
    if wire.stream:
        events = job.events(ids)
        how = {"to_response": error_response, "to_event": error_event, "ping": serving.settings.ping}
        return EventStream(events, **how, numbering=ids)
    answers = await while_connected(request.receive, all_of(serving.front.complete, prompts))
    heavy = wire.logprobs is not None or wire.prompt_logprobs is not None
    return await write_json(heavy, job.response, answers)


# -- to_requests -------------------------------------------------------------------------------------------


async def to_requests(wire: CompletionRequest, serving: Serving, request: HTTPRequest) -> list[Request]:
    """One request of the core per prompt. Raises InvalidRequest for unsupported requests."""
    front, settings = serving.front, serving.settings
    check_logprobs(serving, logprobs=wire.logprobs, prompt_logprobs=wire.prompt_logprobs)
    _refuse(wire)
    given = prompt_list(wire.prompt)
    made = _made(wire)
    if len(given) > settings.max_prompts or len(given) * made > settings.max_answers:
        raise InvalidRequest(
            f"{len(given)} prompts with {made} choices each",
            f"at most {settings.max_prompts} prompts and {settings.max_answers} choices", param="prompt",
        )  # fmt: skip
    max_tokens = 1 if wire.max_tokens == 0 else wire.max_tokens
    scores = _scores_prompt(wire)
    logprobs = 0 if wire.logprobs is None and made > (wire.n or 1) else wire.logprobs
    counts = {"n": made, "max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": scores}
    params = to_params(wire, front.info, serving.own, **counts)
    with named(wire):
        await front.learn(params)
    fields = scheduling_fields(wire, serving, request) | speculation_of(wire)
    fields["no_cache"] |= wire.cache_prompt is False
    fields["progress"] = bool(wire.stream and wire.return_progress)
    fields |= transfer_fields(wire.kv_transfer_params, front.info, bool(wire.stream), len(given))
    each = await fields_of_each(wire.lora_path, wire.lora, fields, len(given), serving, request)
    requests = []
    for prompt, fields in zip(given, each, strict=True):
        ends: tuple[int, ...] = ()
        if wire.suffix:
            special = wire.add_special_tokens is not False
            ids, ends = await front.encode_infill(prompt, wire.suffix, add_special_tokens=special)
        else:
            bound = "context" if wire.truncate_prompt_tokens is None else "count"
            ids = await serving.ids_of(prompt, wire.add_special_tokens, "prompt", bound)
            ids = truncated(tuple(ids), wire, front.info.max_model_len)
        fitted = _fit(params, len(ids), front.info.max_model_len)
        core = front.resolve(ids, fitted, **fields)
        requests.append(replace(core, eos_ids=(*(core.eos_ids or ()), *ends)) if ends else core)
    return requests


def _made(wire: CompletionRequest) -> int:
    """Number of choices generated per prompt. Raises InvalidRequest."""
    returned = 1 if wire.n is None else wire.n
    made = returned if wire.best_of is None else wire.best_of
    if wire.best_of is not None and not max(1, returned) <= made <= MAX_N:
        message = f"best_of is {made} and n is {returned}"
        raise InvalidRequest(message, f"expected best_of from n to {MAX_N}", param="best_of")
    if made > returned and wire.stream:
        raise InvalidRequest("best_of cannot be streamed: the best is known at the end", param="best_of")
    return made


def _scores_prompt(wire: CompletionRequest) -> int | None:
    """Number of candidates per prompt token, from prompt_logprobs or for the echo; None for no scores."""
    wanted = (wire.prompt_logprobs, wire.logprobs if wire.echo else None)
    return max((n for n in wanted if n is not None), default=None)


def _refuse(wire: CompletionRequest) -> None:
    refuse_fields(wire)
    check_stream_options(wire)
    if wire.suffix and wire.echo:
        raise InvalidRequest("echo is not supported with a suffix", "concatenate them in the client", param="echo")
    if wire.max_tokens == 0 and not wire.echo:
        raise InvalidRequest("max_tokens is 0", "0 is allowed only with echo=true", param="max_tokens")
    if wire.stream and wire.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed", "leave out stream", param="prompt_logprobs")
    if wire.stream and wire.echo and wire.logprobs is not None and (wire.n or 1) > 1:
        raise InvalidRequest("echo with logprobs and stream needs n = 1", param="n")


def _fit(params: SamplingParams, prompt_tokens: int, context: int) -> SamplingParams:
    """Without a requested length, sets the API's default length, limited by the context."""
    if params.max_tokens is not None:
        return params
    room = max(1, context - prompt_tokens)
    return replace(params, max_tokens=max(min(DEFAULT_MAX_TOKENS, room), min(params.min_tokens, room)))


# -- responses ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class CompletionJob:
    """One HTTP request: its prompts, and how their choices are encoded. Choice i * n + j is the j-th choice of prompt
    i, the j-th best with best_of > n. begun: in seconds of time.monotonic."""

    wire: CompletionRequest
    serving: Serving
    id: str
    created: int
    prompts: list[Request]
    begun: float = 0.0

    @property
    def only_echo(self) -> bool:
        """Whether no token was requested. One is sampled anyway, since the prompt's scores come with it."""
        return self.wire.max_tokens == 0

    @property
    def num_returned(self) -> int:
        """Number of choices returned per prompt."""
        return self.wire.n or 1

    @property
    def prompt_tokens(self) -> int:
        return sum(len(core.prompt_ids) for core in self.prompts)

    def response(self, answers: list[list[Answer]]) -> dict[str, Any]:
        response = head_object(self.serving, "text_completion", self.id, self.created)
        response["choices"] = [
            self._choice(i, answer, per_prompt[0].prompt_logprobs)
            for i, per_prompt in enumerate(answers)
            for answer in best(per_prompt, self.num_returned)
        ]
        usages = [[self._usage(answer.usage) for answer in per_prompt] for per_prompt in answers]
        response["usage"] = usage_object(usages, self.prompt_tokens)
        return response | transfer_object(self.prompts[0], self.serving.front.info)

    def _choice(self, i: int, answer: Answer, scores: tuple[TokenInfo, ...] | None) -> dict[str, Any]:
        """`scores` are the prompt's; they come with its first choice and apply to all of them."""
        core = self.prompts[i]
        check_finish(answer, self.id)
        choice = self._text(i, answer, with_prompt=bool(self.wire.echo), scores=scores)
        choice |= self._ending(core, answer)
        if self.wire.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(_cut(scores or (), self.wire.prompt_logprobs))
        if self.wire.return_token_ids:
            choice |= {"token_ids": self._shown(answer.token_ids), "prompt_token_ids": core.prompt_ids}
        return choice

    def _text(
        self, i: int, answer: Answer | TextDelta, with_prompt: bool, scores: tuple[TokenInfo, ...] | None
    ) -> dict[str, Any]:
        """The choice's text and log-probabilities, preceded by the prompt's if it is to be echoed."""
        prompt = self._prompt_text(i) if with_prompt else ""
        logprobs = None
        if self.wire.logprobs is not None:
            before = _cut(scores or (), self.wire.logprobs) if with_prompt else []
            logprobs = completion_logprobs(before)
            shift = len(self._prompt_text(i)) if self.wire.echo else 0
            for name, values in completion_logprobs(self._shown(answer.logprobs), shift).items():
                logprobs[name] += values
        text = "" if self.only_echo else answer.text
        index = i * self.num_returned + answer.index
        return {"index": index, "text": prompt + text, "logprobs": logprobs, "finish_reason": None}

    def _ending(self, core: Request, answer: Answer | TextDelta) -> dict[str, Any]:
        reason = FinishReason.LENGTH if self.only_echo else answer.finish_reason
        seed = {} if core.params.greedy else {"seed": core.params.seed}
        return {
            "finish_reason": reason,
            "stop_reason": None if self.only_echo else answer.stop_reason,
            **seed,
        }

    def _prompt_text(self, i: int) -> str:
        core = self.prompts[i]
        return prompt_text(self.serving.front.tokenizer, core.prompt_ids, core.params.skip_special_tokens)

    def _shown(self, per_token: Any) -> Any:
        return per_token[:0] if self.only_echo else per_token

    def _usage(self, usage: Usage) -> Usage:
        return Usage(usage.prompt_tokens, 0, usage.cached_tokens) if self.only_echo else usage

    # -- the stream ----------------------------------------------------------------------------------------

    async def events(self, ids: EventIds | None = None) -> AsyncGenerator[bytes]:
        """The chunks of all choices, the usage if requested, and the end marker."""
        options = self.wire.stream_options
        final_usage = bool(options and options.include_usage)
        always_usage = bool(options and options.continuous_usage_stats)
        chunks = Chunks(self.serving, "text_completion", self.id, self.created, with_usage=final_usage)
        usages: list[dict[int, Usage]] = [{} for _ in self.prompts]
        timings = [Timings(bool(self.wire.timings_per_token), self.begun) for _ in self.prompts]
        streams = [self.serving.front.stream(core, through=ids and ids.through) for core in self.prompts]
        async with aclosing(merge(streams, ahead=ids is None)) as deltas:
            async for i, delta in deltas:
                check_finish(delta, self.id)
                if delta.progress is not None:
                    if not usages[i]:  # it is computed again after the engine has died
                        choice = {"index": i * self.num_returned + delta.index, "text": "", "logprobs": None}
                        choice["finish_reason"] = None
                        yield chunks.event([choice], prompt_progress=progress_object(delta))
                    continue
                is_first = delta.index not in usages[i]
                usages[i][delta.index] = self._usage(delta.usage)
                choice, timed = self._chunk(i, delta, is_first), timings[i].of(delta)
                if choice is not None:
                    yield chunks.event([choice], self._total(usages) if always_usage else None, **timed)
        if final_usage:
            yield chunks.event([], self._total(usages))
        yield DONE

    def _total(self, usages: list[dict[int, Usage]]) -> dict[str, Any]:
        return usage_object([per_prompt.values() for per_prompt in usages], self.prompt_tokens)

    def _chunk(self, i: int, delta: TextDelta, is_first: bool) -> dict[str, Any] | None:
        """The chunk choice of a delta, or None if it has nothing to report."""
        wire, core = self.wire, self.prompts[i]
        choice = self._text(i, delta, with_prompt=is_first and bool(wire.echo), scores=delta.prompt_logprobs)
        if wire.return_token_ids:
            choice["token_ids"] = self._shown(delta.token_ids)
            if is_first:
                choice["prompt_token_ids"] = core.prompt_ids
        if delta.finish_reason:
            choice |= self._ending(core, delta)
        reports_tokens = wire.logprobs is not None or wire.return_token_ids
        is_reported = choice["text"] or delta.finish_reason or is_first or (reports_tokens and delta.token_ids)
        return choice if is_reported else None


def _cut(infos: tuple[TokenInfo, ...], top: int) -> list[TokenInfo]:
    """Limits the candidates to `top`: two fields of a request may ask for different numbers."""
    return [replace(info, top=info.top[:top]) for info in infos]
