"""Range checks of sampling parameters: at the edge, with the field named, before any work."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvasir.errors import InvalidRequest

if TYPE_CHECKING:
    from kvasir.types import SamplingParams

MAX_N = 128
MAX_LOGPROBS = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIAS = 1024


def _number(p: SamplingParams, name: str, low: float, high: float, *, open_low: bool = False) -> None:
    value = getattr(p, name)
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or value > high or value < low or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InvalidRequest(f"{name} is {value!r}", f"expected a number in {bracket}{low}, {high}]", param=name)


def _integer(p: SamplingParams, name: str, low: int, high: int, *, optional: bool = False) -> None:
    value = getattr(p, name)
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequest(f"{name} is {value!r}", f"expected an integer in [{low}, {high}]", param=name)


def check_sampling(p: SamplingParams) -> None:
    """Raises InvalidRequest with `param` set at the first field out of its range."""
    _integer(p, "n", 1, MAX_N)
    _number(p, "temperature", 0.0, 100.0)
    _number(p, "top_p", 0.0, 1.0, open_low=True)
    _integer(p, "top_k", -1, 2**31 - 1)
    _number(p, "min_p", 0.0, 1.0)
    _number(p, "presence_penalty", -2.0, 2.0)
    _number(p, "frequency_penalty", -2.0, 2.0)
    _number(p, "repetition_penalty", 0.0, 10.0, open_low=True)
    _integer(p, "seed", -(2**63), 2**64 - 1, optional=True)
    _integer(p, "max_tokens", 1, 2**31 - 1, optional=True)
    _integer(p, "min_tokens", 0, 2**31 - 1)
    _integer(p, "logprobs", 0, MAX_LOGPROBS, optional=True)
    _integer(p, "prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise InvalidRequest(f"min_tokens {p.min_tokens} is larger than max_tokens {p.max_tokens}", param="min_tokens")
    if len(p.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"{len(p.stop)} stop strings", f"at most {MAX_STOP_STRINGS}", param="stop")
    for s in p.stop:
        if not isinstance(s, str) or not s or len(s) > MAX_STOP_CHARS:
            raise InvalidRequest("a stop string is empty, too long or no string",
                                 f"expected 1 to {MAX_STOP_CHARS} characters", param="stop")  # fmt: skip
    for t in p.stop_token_ids:
        if not isinstance(t, int) or isinstance(t, bool) or not 0 <= t < 2**31:
            raise InvalidRequest(f"stop_token_ids holds {t!r}", "expected token ids", param="stop_token_ids")
    if len(p.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"{len(p.logit_bias)} logit_bias entries", f"at most {MAX_LOGIT_BIAS}", param="logit_bias")
    for token, bias in p.logit_bias.items():
        if not isinstance(token, int) or not 0 <= token < 2**31:
            raise InvalidRequest(f"logit_bias names token {token!r}", "expected token ids", param="logit_bias")
        if not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise InvalidRequest(f"logit_bias of token {token} is {bias!r}", "expected [-100, 100]", param="logit_bias")
