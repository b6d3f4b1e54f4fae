"""Checks of requests from another process or machine, which did not pass through this process's front."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvasir.engine.checks import check_drafts, check_ids, check_task, check_vocabulary
from kvasir.errors import InvalidRequest
from kvasir.types import ModelInfo, Request

MAX_NAME = 512  # characters of ids and names
MAX_PRIORITY = 2**31 - 1
MAX_CARRY = 1 << 16  # bytes
MAX_DRAIN = 86400.0  # seconds


def check_drain(seconds: float) -> float:
    """The seconds. Raises InvalidRequest unless they are in range."""
    _need(0 <= seconds <= MAX_DRAIN, "seconds are out of range", "drain")
    return seconds


def check_request(info: ModelInfo, request: Request) -> None:
    """Raises InvalidRequest unless the request is complete, and its values are in range. Lengths are the scheduler's
    matter."""
    check_task(info, request.task)
    check_ids(info, request.prompt_ids, "prompt")
    check_vocabulary(info, request.params)
    check_drafts(info, request.speculation, request.prediction)
    params, n = request.params, request.params.n
    _need(params.max_tokens is not None, "max_tokens is missing", "max_tokens")
    for name in (request.id, request.tenant, request.cache_salt or "", request.trace):
        _need(len(name) <= MAX_NAME, f"a name of {len(name)} characters", "id")
    _need(min(request.deaths, request.lives) >= 0, "deaths or lives are negative", "deaths")
    _need(abs(request.priority) <= MAX_PRIORITY, "priority is out of range", "priority")
    _need(0 < request.weight < math.inf, "weight is out of range", "weight")
    for seconds in (request.waited, request.deadline, request.cache_ttl):
        _need(seconds is None or 0 <= seconds < math.inf, "seconds are out of range", "deadline")
    ids = (request.eos_ids or (), *request.bad_word_ids, *request.dry_breaker_sequences, *request.resume_ids)
    for some in ids:
        _need(not some or _within(some, info.vocab_size), "token ids are outside of the vocabulary", "ids")
    for resumed in (request.resume_ids, request.resume_carries):
        _need(len(resumed) in (0, n), f"{len(resumed)} resumed choices of {n}", "resume_ids")
    _need(all(len(carry) <= MAX_CARRY for carry in request.resume_carries), "a carry is too long", "resume_carries")
    _need(_within(request.done, n) if request.done else True, "choices that do not exist are done", "done")
    _need(len(set(request.done)) < n, "no choice is open", "done")


def _within(values: Sequence[int], end: int) -> bool:
    return min(values) >= 0 and max(values) < end


def _need(fits: bool, message: str, param: str) -> None:
    if not fits:
        raise InvalidRequest(message, "send what an engine's front resolves", param=param)
