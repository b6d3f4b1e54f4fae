"""Converts wire fields to SamplingParams: names and defaults of the model only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvasir.errors import InvalidRequest
from kvasir.serve.conversation.sampling import NOTHING, sampling_params, to_bias
from kvasir.serve.dialects.openai.structured import to_structured
from kvasir.serve.dialects.openai.wire import Samplers, Sampling
from kvasir.serve.http.wire import refuse_fields
from kvasir.types import ModelInfo, SamplingParams, ServiceClass

# Wire fields that have the same name in SamplingParams.
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold"),
    *("dynatemp_range", "dynatemp_exponent", "mirostat", "mirostat_tau", "mirostat_eta"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "bad_words"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "min_tokens", "thinking_token_budget"),
    *("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
)
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
    """given: fields whose meaning differs between routes; see `sampling_params`. Raises InvalidRequest."""
    asked = sampler_fields(wire)
    asked |= {name: value for name in ("n", "prompt_logprobs") if (value := getattr(wire, name)) is not None}
    asked["structured_outputs"] = to_structured(wire)
    return sampling_params(asked, info, own, **given)


def sampler_fields(wire: Samplers) -> dict[str, Any]:
    """The fields of SamplingParams that a request gives. Raises InvalidRequest."""
    asked: dict[str, Any] = {name: value for name in _SAME if (value := getattr(wire, name)) is not None}
    if wire.stop is not None:
        asked["stop"] = (wire.stop,) if isinstance(wire.stop, str) else tuple(wire.stop)
    if wire.stop_token_ids is not None:
        asked["stop_token_ids"] = tuple(wire.stop_token_ids)
    if wire.logit_bias:
        asked["logit_bias"] = to_bias(wire.logit_bias)
    return asked


def check_stream_options(wire: Sampling) -> None:
    """Raises InvalidRequest for stream options without a stream, and for unsupported ones."""
    if wire.stream_options is None:
        return
    if not wire.stream:
        raise InvalidRequest("stream_options is only for stream=true", param="stream_options")
    refuse_fields(wire.stream_options)
