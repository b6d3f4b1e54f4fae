"""The response objects shared by completions and chats, and the framing of stream chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from kvasir.engine.answer import TextDelta, TokenInfo
from kvasir.engine.pace import Pace
from kvasir.serve.conversation.logprobs import finite
from kvasir.serve.conversation.timings import timings_object
from kvasir.serve.dialects.openai.errors import openai_error, openai_response
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.faults import Fault
from kvasir.serve.http.sse import event
from kvasir.types import Usage


def usage_object(prompts: Iterable[Collection[Usage]], prompt_tokens: int, predicted: bool = False) -> dict[str, Any]:
    """`prompts`: for each prompt the usage of its choices, which share the prompt's cached tokens. Details are included
    if there are any. `predicted`: whether the request predicts its answer, so that there are counts of drafts."""
    completion = cached = 0
    details = Counter[str]()
    for answers in prompts:
        completion += sum(usage.completion_tokens for usage in answers)
        for usage in answers:
            details["reasoning_tokens"] += usage.reasoning_tokens
            details["accepted_prediction_tokens"] += usage.accepted_tokens
            details["rejected_prediction_tokens"] += usage.rejected_tokens
        cached += max((usage.cached_tokens for usage in answers), default=0)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        **({"completion_tokens_details": dict(details)} if predicted or any(details.values()) else {}),
    }


class Timings:
    """The `timings` of chunks, if requested: of each choice so far."""

    def __init__(self, wanted: bool, begun: float):
        """begun: start of the request, in seconds of time.monotonic."""
        self._wanted, self._begun = wanted, begun
        self._paces: dict[int, Pace] = {}

    def of(self, delta: TextDelta) -> dict[str, Any]:
        """Additional fields for the chunks of a delta."""
        if not self._wanted:
            return {}
        pace = self._paces.setdefault(delta.index, Pace(self._begun))
        pace.saw(delta)
        return {"timings": timings_object(pace, delta.usage)}


class Chunks:
    """Encodes stream chunks; their common part is encoded once.

    with_usage: every chunk has a `usage` member, null unless it is given.
    """

    def __init__(self, serving: Serving, kind: str, id: str, created: int, with_usage: bool, tier: str | None = None):
        head = head_object(serving, kind, id, created, tier)
        self._head = msgspec.json.encode(head)[:-1] + b',"choices":'
        self._tail = b',"usage":null}' if with_usage else b"}"

    def event(self, choices: list[dict[str, Any]], usage: dict | None = None, **more: Any) -> bytes:
        tail = self._tail
        if usage is not None:
            tail = b',"usage":' + msgspec.json.encode(usage) + b"}"
        if more:
            tail = b"," + msgspec.json.encode(more)[1:-1] + tail
        return event(self._head + msgspec.json.encode(choices) + tail)


def head_object(serving: Serving, kind: str, id: str, created: int, tier: str | None = None) -> dict[str, Any]:
    """tier: see params.served_tier."""
    return {
        "id": id,
        "object": kind,
        "created": created,
        "model": serving.names[0],
        "system_fingerprint": serving.fingerprint,
        **({"service_tier": tier} if tier else {}),
    }


def error_event(fault: Fault) -> bytes:
    return event(openai_error(fault))


def error_response(fault: Fault) -> Response:
    return openai_response(fault)


# -- log-probabilities -------------------------------------------------------------------------------------


def completion_logprobs(infos: Sequence[TokenInfo], shift: int = 0) -> dict[str, Any]:
    """The older format: parallel lists. `shift` is added to offsets, for tokens after an echoed prompt."""
    return {
        "tokens": [_label(info.bytes) for info in infos],
        "token_logprobs": [None if info.logprob is None else finite(info.logprob) for info in infos],
        "top_logprobs": [_top(info) for info in infos],
        "text_offset": [info.offset + shift for info in infos],
    }


def _top(info: TokenInfo) -> dict[str, float] | None:
    """The best candidates and the token itself, by their text; among those with the same text the best."""
    if info.logprob is None:
        return None
    found: dict[str, float] = {}
    for data, logprob in (*((c.bytes, c.logprob) for c in info.top), (info.bytes, info.logprob)):
        found.setdefault(_label(data), finite(logprob))
    return found


def prompt_logprobs(infos: Sequence[TokenInfo]) -> list[dict[str, Any] | None]:
    """vLLM's format: per prompt token the candidates by id, and the token itself."""
    return [None if info.logprob is None else _by_id(info) for info in infos]


def _by_id(info: TokenInfo) -> dict[str, Any]:
    entries = {
        str(c.token): {"logprob": finite(c.logprob), "rank": rank, "decoded_token": c.text}
        for rank, c in enumerate(info.top, 1)
    }
    own = {"logprob": finite(info.logprob), "rank": info.rank, "decoded_token": info.text}
    return entries | {str(info.token): own}


def _label(data: bytes) -> str:
    """A token's text, or its bytes in OpenAI's notation if they are not complete UTF-8 characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data)
