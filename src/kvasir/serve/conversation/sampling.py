"""Sampling parameters of a request: what it says, then what its model recommends, then the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvasir.errors import InvalidRequest
from kvasir.types import ModelInfo, SamplingParams

NOTHING: Mapping[str, Any] = MappingProxyType({})
# Fields that a model's generation_config.json may recommend.
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

# Mirostat replaces these filters: a model's recommendation of them is dropped, a value in the request is not.
_FILTERS = ("top_p", "top_k", "min_p")


def sampling_params(
    asked: Mapping[str, Any], info: ModelInfo, own: Mapping[str, Any] = NOTHING, **given: Any
) -> SamplingParams:
    """asked: fields of SamplingParams that the request gives. own: those of the model's store entry. given: fields that
    the request always has; None yields to the store entry's value. Raises InvalidRequest."""
    unwanted = _FILTERS if asked.get("mirostat") or own.get("mirostat") else ()
    recommended = {k: v for k, v in info.default_sampling.items() if k in _RECOMMENDED}
    fields: dict[str, Any] = {k: v for k, v in recommended.items() if k not in unwanted} | dict(own)
    if "presence_penalty" in asked or "frequency_penalty" in asked:
        fields.pop("occurrence_last_n", None)  # they count generated tokens only
    given = {k: v for k, v in given.items() if v is not None or k not in own}
    return SamplingParams(**(fields | dict(asked) | given))


def to_bias(bias: Mapping[str, float]) -> dict[int, float]:
    """Token ids -> bias. JSON has only string keys. Raises InvalidRequest for a key that is not a token id."""
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise InvalidRequest(f"logit_bias names {key[:40]!r}", "expected token ids", param="logit_bias")
    return {int(key): value for key, value in bias.items()}
