"""Converts wire fields to SamplingParams: names and defaults of the model only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvasir.errors import InvalidRequest
from kvasir.serve.dialects.openai.structured import to_structured
from kvasir.serve.dialects.openai.wire import Sampling
from kvasir.serve.http.wire import refuse_fields
from kvasir.types import ModelInfo, SamplingParams, ServiceClass

NOTHING: Mapping[str, Any] = MappingProxyType({})
# Wire fields that have the same name in SamplingParams.
_SAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold"),
    *("dynatemp_range", "dynatemp_exponent", "mirostat", "mirostat_tau", "mirostat_eta"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "bad_words"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "min_tokens", "thinking_token_budget"),
    *("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "prompt_logprobs"),
)
# Fields that a model's generation_config.json may recommend.
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

# Mirostat replaces these filters: a model's recommendation of them is dropped, a value in the request is not.
_FILTERS = ("top_p", "top_k", "min_p")

# service_tier -> class; the other tiers ("auto", "default", "scale") leave it to the header and the key.
TIERS = dict.fromkeys(("priority", "fast", "ultrafast"), ServiceClass.INTERACTIVE) | {"flex": ServiceClass.BATCH}


def served_tier(asked: str | None, slo: ServiceClass) -> str | None:
    """The tier in which a request was served, whichever it asked for; None if it asked for none."""
    if asked is None:
        return None
    if slo is not ServiceClass.INTERACTIVE:
        return "flex"
    return "priority" if TIERS.get(asked) is slo else "default"


def to_params(wire: Sampling, info: ModelInfo, own: Mapping[str, Any] = NOTHING, **given: Any) -> SamplingParams:
    """`given` are fields whose meaning differs between routes. An absent field takes the value of the model's store
    entry (`own`), then its recommendation, then the API's default. Raises InvalidRequest."""
    unwanted = _FILTERS if wire.mirostat or own.get("mirostat") else ()
    recommended = {k: v for k, v in info.default_sampling.items() if k in _RECOMMENDED}
    fields: dict[str, Any] = {k: v for k, v in recommended.items() if k not in unwanted} | dict(own)
    given = {k: v for k, v in given.items() if v is not None or k not in own}
    fields |= {name: value for name in _SAME if (value := getattr(wire, name)) is not None}
    if wire.presence_penalty is not None or wire.frequency_penalty is not None:
        fields.pop("occurrence_last_n", None)  # in this API they count generated tokens only
    if wire.stop is not None:
        fields["stop"] = (wire.stop,) if isinstance(wire.stop, str) else tuple(wire.stop)
    if wire.stop_token_ids is not None:
        fields["stop_token_ids"] = tuple(wire.stop_token_ids)
    fields["structured_outputs"] = to_structured(wire)
    if wire.logit_bias:
        fields["logit_bias"] = to_bias(wire.logit_bias)
    return SamplingParams(**(fields | given))


def to_bias(bias: dict[str, float]) -> dict[int, float]:
    """Token ids -> bias. JSON has only string keys. Raises InvalidRequest for a key that is not a token id."""
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise InvalidRequest(f"logit_bias names {key[:40]!r}", "expected token ids", param="logit_bias")
    return {int(key): value for key, value in bias.items()}


def check_stream_options(wire: Sampling) -> None:
    """Raises InvalidRequest for stream options without a stream, and for unsupported ones."""
    if wire.stream_options is None:
        return
    if not wire.stream:
        raise InvalidRequest("stream_options is only for stream=true", param="stream_options")
    refuse_fields(wire.stream_options)
