"""Range checks of sampling parameters, made before any work; errors name the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvasir.errors import InvalidRequest, quoted

MAX_N = 128
MAX_LOGPROBS = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 128
MAX_BREAKERS = 32
MAX_BREAKER_CHARS = 40


class Sampling(Protocol):
    """The fields of types.SamplingParams with special rules; the others are read by name."""

    @property
    def mirostat(self) -> int: ...

    @property
    def max_tokens(self) -> int | None: ...

    @property
    def min_tokens(self) -> int: ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    @property
    def logit_bias(self) -> Mapping[int, float]: ...

    @property
    def structured_outputs(self) -> object | None: ...


def _number(p: object, name: str, low: float, high: float, *, open_low: bool = False) -> None:
    value = getattr(p, name)
    ok = isinstance(value, int | float) and not isinstance(value, bool)
    if not ok or not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InvalidRequest(f"{name} is {quoted(value)}", f"expected a number in {bracket}{low}, {high}]", param=name)


def _integer(p: object, name: str, low: int, high: int, *, optional: bool = False) -> None:
    value = getattr(p, name)
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequest(f"{name} is {quoted(value)}", f"expected an integer in [{low}, {high}]", param=name)


def _texts(p: object, name: str, most: int, chars: int) -> None:
    texts = getattr(p, name)
    if len(texts) > most:
        raise InvalidRequest(f"{name} has {len(texts)} strings", f"at most {most}", param=name)
    if any(not isinstance(s, str) or not s or len(s) > chars for s in texts):
        raise InvalidRequest(f"{name} has one that is empty, too long or no string",
                             f"expected 1 to {chars} characters", param=name)  # fmt: skip


def check_sampling(p: Sampling) -> None:
    """Raises InvalidRequest, with `param` set, for the first field that is out of range."""
    _integer(p, "n", 1, MAX_N)
    _number(p, "temperature", 0.0, 100.0)
    _number(p, "top_p", 0.0, 1.0, open_low=True)
    _integer(p, "top_k", -1, 2**31 - 1)
    _number(p, "min_p", 0.0, 1.0)
    _number(p, "typical_p", 0.0, 1.0, open_low=True)
    _number(p, "top_n_sigma", -1.0, 1000.0)
    _number(p, "xtc_probability", 0.0, 1.0)
    _number(p, "xtc_threshold", 0.0, 1.0)
    _number(p, "dynatemp_range", 0.0, 100.0)
    _number(p, "dynatemp_exponent", 0.0, 100.0)
    if type(p.mirostat) is not int or p.mirostat not in (0, 2):
        raise InvalidRequest(f"mirostat is {quoted(p.mirostat)}", "expected 0 (off) or 2 (version 2)", param="mirostat")
    _number(p, "mirostat_tau", 0.0, 100.0)
    _number(p, "mirostat_eta", 0.0, 10.0)
    _number(p, "presence_penalty", -2.0, 2.0)
    _number(p, "frequency_penalty", -2.0, 2.0)
    _number(p, "repetition_penalty", 0.0, 10.0, open_low=True)
    _integer(p, "repetition_last_n", -1, 2**31 - 1)
    _integer(p, "occurrence_last_n", -1, 2**31 - 1)
    _number(p, "dry_multiplier", 0.0, 1000.0)
    _number(p, "dry_base", 1.0, 1000.0)
    _integer(p, "dry_allowed_length", 0, 2**31 - 1)
    _integer(p, "dry_penalty_last_n", -1, 2**31 - 1)
    _texts(p, "dry_sequence_breakers", MAX_BREAKERS, MAX_BREAKER_CHARS)
    _texts(p, "bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
    _integer(p, "seed", -(2**63), 2**64 - 1, optional=True)
    _integer(p, "max_tokens", 1, 2**31 - 1, optional=True)
    _integer(p, "min_tokens", 0, 2**31 - 1)
    _integer(p, "thinking_token_budget", 0, 2**31 - 1, optional=True)
    _integer(p, "logprobs", 0, MAX_LOGPROBS, optional=True)
    _integer(p, "prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise InvalidRequest(f"min_tokens {p.min_tokens} is larger than max_tokens {p.max_tokens}", param="min_tokens")
    if p.structured_outputs is not None:
        for name in ("min_tokens", "ignore_eos"):
            if getattr(p, name):
                message = f"{name} goes against structured_outputs, which say where the answer ends"
                raise InvalidRequest(message, "leave it out", param=name)
    _texts(p, "stop", MAX_STOP_STRINGS, MAX_STOP_CHARS)
    for t in p.stop_token_ids:
        if not isinstance(t, int) or isinstance(t, bool) or not 0 <= t < 2**31:
            raise InvalidRequest(f"stop_token_ids holds {quoted(t)}", "expected token ids", param="stop_token_ids")
    if len(p.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"{len(p.logit_bias)} logit_bias entries", f"at most {MAX_LOGIT_BIAS}", param="logit_bias")
    for token, bias in p.logit_bias.items():
        if not isinstance(token, int) or not 0 <= token < 2**31:
            raise InvalidRequest(f"logit_bias names token {quoted(token)}", "expected token ids", param="logit_bias")
        if not isinstance(bias, int | float) or not -100 <= bias <= 100:
            message = f"logit_bias of token {token} is {quoted(bias)}"
            raise InvalidRequest(message, "expected [-100, 100]", param="logit_bias")


def check_structured(wanted: object) -> None:
    """wanted: types.StructuredOutputs. Raises InvalidRequest unless exactly one kind is given."""
    kinds = ("json", "json_object", "regex", "choice", "grammar", "tags")
    given = [name for name in kinds if getattr(wanted, name) not in (None, False)]
    if len(given) != 1:
        raise InvalidRequest(
            f"{len(given)} kinds of structured output are asked for",
            f"exactly one of {', '.join(kinds)}", param="structured_outputs",
        )  # fmt: skip
