"""Converts wire fields to SamplingParams: names and defaults of the model only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvasir.errors import InvalidRequest
from kvasir.serve.conversation.sampling import NOTHING, asked_fields, sampling_params
from kvasir.serve.dialects.openai.extensions import penalty
from kvasir.serve.dialects.openai.structured import to_structured
from kvasir.serve.dialects.openai.wire import Sampling
from kvasir.serve.http.wire import refuse_fields
from kvasir.types import ModelInfo, SamplingParams, ServiceClass

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
    wanted = asked_fields(wire, "openai")
    wanted |= {name: value for name in ("n", "prompt_logprobs") if (value := getattr(wire, name)) is not None}
    penalty(wire, wanted)
    wanted["structured_outputs"] = to_structured(wire)
    return sampling_params(wanted, info, own, **given)


def check_stream_options(wire: Sampling) -> None:
    """Raises InvalidRequest for stream options without a stream, and for unsupported ones."""
    if wire.stream_options is None:
        return
    if not wire.stream:
        raise InvalidRequest("stream_options is allowed only with stream=true", param="stream_options")
    refuse_fields(wire.stream_options)
