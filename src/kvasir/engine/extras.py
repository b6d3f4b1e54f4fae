"""What a program may ask of a request besides its prompt and its sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from kvasir.adapters import Lora, chosen_adapters
from kvasir.engine.lora_requests import LoraRequests, NamesAdapter
from kvasir.engine.predicting import Choice, Prediction, draft_fields
from kvasir.errors import InvalidRequest

if TYPE_CHECKING:
    from kvasir.engine.front import Front

T = TypeVar("T")


class Extras(TypedDict, total=False):
    """prediction, speculation: see `predicting.draft_fields`; they change no output. lora: the name of an adapter, or a
    list of names or (name, scale), [] for the base model alone. lora_request: vLLM's, an adapter by name and path."""

    prediction: Prediction | None
    speculation: Choice | None
    lora: Lora | None
    lora_request: NamesAdapter | None


class LoraOfMany(TypedDict, total=False):
    """For many prompts: `lora` of all, `lora_request` one for all or a list of one or None for each."""

    lora: Lora | None
    lora_request: NamesAdapter | Sequence[NamesAdapter | None] | None


class ExtrasOfMany(LoraOfMany, total=False):
    """`Extras` for many prompts: prediction that of a single prompt, or a list of one or None for each."""

    prediction: Prediction | Sequence[Prediction | None] | None
    speculation: Choice | None


async def extra_fields(
    front: Front,
    loras: LoraRequests,
    *,
    prediction: Prediction | None = None,
    speculation: Choice | None = None,
    lora: Lora | None = None,
    lora_request: NamesAdapter | None = None,
) -> dict[str, Any]:
    """The fields of an engine request. Raises KvasirError."""
    fields = await draft_fields(front, prediction, speculation)
    return {**fields, "adapters": chosen_adapters(await loras.chosen(lora, lora_request))}


def one_of(params: T | None, sampling_params: T | None) -> T | None:
    """The sampling parameters, given under Kvasir's name or vLLM's. Raises InvalidRequest for both."""
    if params is not None and sampling_params is not None:
        raise InvalidRequest("params and sampling_params are given", "they are the same: give one", "sampling_params")
    return sampling_params if params is None else params
