"""Admission: refuses requests that can never run, and makes one sequence for each choice of the others."""

from __future__ import annotations

import hashlib
from array import array

from kvasir import inputs
from kvasir.errors import InvalidRequest, PromptTooLong
from kvasir.fields import SAMPLER
from kvasir.kv.blocks import SequenceBlocks
from kvasir.kv.manager import KVManager
from kvasir.plan import Capacity, Encoders, SamplingSpec
from kvasir.sched.content import MarkIds, SequenceContent
from kvasir.sched.counts import Counts
from kvasir.sched.emission import Emission
from kvasir.sched.sequence import Sequence
from kvasir.seeds import answer_seed
from kvasir.types import Request, Task

_SAME = tuple(row.name for row in SAMPLER)
PRIVATE = b"request:"  # begins the namespace of a request that shares no prefixes
SHARED = b"shared:"  # only blocks in namespaces with this prefix may be saved to a tier that outlives the engine


def refuse_impossible(request: Request, capacity: Capacity, kv: KVManager, max_chunk: int, bidirectional: bool) -> None:
    """Raises InvalidRequest if the request can never be computed, PromptTooLong if its prompt exceeds the context or,
    with a bidirectional model, a step."""
    length = len(request.prompt_ids)
    _refuse_inputs(request, capacity, max_chunk, bidirectional)
    full = request.params.max_tokens or capacity.max_model_len
    if any(len(r) >= full for i, r in enumerate(request.resume_ids) if i not in request.done):
        raise InvalidRequest("a resumed sequence already has its full length", param="resume_ids")
    if not length:
        raise InvalidRequest("the prompt is empty", "give at least one token", param="prompt")
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= capacity.vocab_size:
        bad = next(t for t in request.prompt_ids if not 0 <= t < capacity.vocab_size)
        raise InvalidRequest(f"token id {bad} in the prompt", f"expected [0, {capacity.vocab_size})", param="prompt")
    generates = request.task is Task.GENERATE
    if length + generates > capacity.max_model_len:
        context = capacity.max_model_len
        message = f"the prompt has {length} tokens; the context holds {context}"
        raise PromptTooLong(message, "shorten it", "prompt", tokens=length, context=context)
    if bidirectional and length > capacity.max_tokens_per_step:
        most = capacity.max_tokens_per_step
        message = f"the prompt has {length} tokens; a step holds {most}"
        raise PromptTooLong(message, "shorten it", "prompt", tokens=length, context=most)
    most = min(length + (request.params.max_tokens or 1) * generates, capacity.max_model_len)
    if not kv.can_ever_hold(most, max_chunk):
        raise InvalidRequest(
            f"{most} tokens never fit the KV memory of {kv.total} blocks of {capacity.block_size}",
            "lower max_tokens, or give the engine more memory",
            param="max_tokens",
        )


def _refuse_inputs(request: Request, capacity: Capacity, max_chunk: int, bidirectional: bool) -> None:
    """Raises InvalidRequest for inputs that this engine cannot compute."""
    if not (request.inputs or request.adapters or request.sources):
        return
    inputs.check(request.inputs, request.adapters, len(request.prompt_ids))
    for feature in inputs.asked(request.inputs, [(a.scale, a.start) for a in request.adapters]):
        if feature not in capacity.computes:
            raise InvalidRequest(f"this engine cannot compute {inputs.FEATURES[feature]}", "leave it out", feature)
    _refuse_sources(request, capacity.encoders, bidirectional)
    most = min(max_chunk, capacity.max_tokens_per_step)
    for span in request.inputs.spans:
        if span.both_ways and span.length > most:
            message = f"{span.length} positions must share a step, which computes {most} of a sequence at most"
            raise InvalidRequest(message, "use a smaller input", "spans")


def _refuse_sources(request: Request, limits: Encoders | None, at_once: bool) -> None:
    """Raises InvalidRequest for sources that the encoders cannot encode. at_once: one step reads all of them."""
    if request.sources and limits is None:
        raise InvalidRequest("this engine has no encoder", "leave out the inputs to encode", "sources")
    inputs.check_sources(request.inputs, request.sources)
    if limits is None:
        return
    largest, total = max((s.length for s in request.sources), default=0), sum(s.length for s in request.sources)
    most = limits.max_bytes // limits.bytes_each
    most = min(most, limits.per_step) if at_once else most
    if largest > limits.per_step or total > most:
        message = f"the largest source gives {largest} embeddings, all sources give {total}"
        raise InvalidRequest(message, f"expected at most {limits.per_step} of one source and {most} in all", "sources")


def make_sequence(
    request: Request,
    index: int,
    order: int,
    max_model_len: int,
    eos_ids: frozenset[int],
    blocks: SequenceBlocks,
    private: bool = False,
    numbers: MarkIds | None = None,
) -> Sequence:
    """The sequence of choice `index` of a request. Ids that an earlier engine already streamed become known tokens.
    private: the sequence shares cached prefixes only with the other sequences of its request. numbers: the
    numbers that replace marks in prefix keys."""
    params = request.params
    ends = eos_ids if request.eos_ids is None else frozenset(request.eos_ids)
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else ends)
    resumed = request.resume_ids[index] if index < len(request.resume_ids) else ()
    tokens = array("i", (*request.prompt_ids, *resumed))
    generates = request.task is Task.GENERATE
    wants_prompt = params.prompt_logprobs is not None and index == 0 and not resumed
    space = namespace(request, private)
    content = SequenceContent(request, numbers or MarkIds(), space, blocks.block_size)
    return Sequence(
        request=request,
        index=index,
        spec=sampling_spec(request, index, stop_ids),
        order=order,
        tokens=tokens,
        counts=Counts(len(tokens)),
        stop_ids=stop_ids,
        max_known=min(len(request.prompt_ids) + generates * (params.max_tokens or max_model_len), max_model_len),
        blocks=blocks,
        content=content,
        embeds=not generates,
        prompt_len=len(request.prompt_ids),
        carry=request.resume_carries[index] if index < len(request.resume_carries) else b"",
        emission=Emission(
            holds_back=params.logprobs is not None,
            unread=1 if wants_prompt else len(tokens),
            prompt_logprobs=[None for _ in request.prompt_ids] if wants_prompt else None,
        ),
    )


def namespace(request: Request, private: bool) -> bytes:
    """What two sequences of a model must have in common, besides ids and marks, to share cached blocks."""
    scope = inputs.scope(request.inputs, request.adapters)
    if private:
        kind, parts = PRIVATE, (request.id,)
    else:
        kind, parts = b"inputs:" if inputs.scope(request.inputs, ()) else SHARED, (request.cache_salt or "",)
    return kind + hashlib.sha256("\0".join(f"{len(p)}:{p}" for p in parts).encode() + scope).digest()


def sampling_spec(request: Request, index: int, stop_ids: frozenset[int]) -> SamplingSpec:
    """The sampler's parameters for choice `index`: each has its own seed; only the first reads the prompt."""
    p = request.params
    same = {name: getattr(p, name) for name in _SAME}
    same["top_k"] = max(p.top_k, 0)
    if p.repetition_penalty == 1.0:
        same["repetition_last_n"] = -1
    if not (p.presence_penalty or p.frequency_penalty):
        same["occurrence_last_n"] = 0
    return SamplingSpec(
        **same,
        dry_breakers=request.dry_breakers,
        dry_breaker_sequences=request.dry_breaker_sequences,
        bad_words=request.bad_word_ids,
        logit_bias=tuple(sorted(p.logit_bias.items())),
        seed=answer_seed(p.seed or 0, index),
        min_tokens=p.min_tokens,
        stop_ids=tuple(sorted(stop_ids)),
        guided=request.grammar is not None,
        logprobs=-1 if p.logprobs is None else p.logprobs,
        prompt_logprobs=-1 if p.prompt_logprobs is None or index else p.prompt_logprobs,
    )
