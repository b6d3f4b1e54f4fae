"""What a caller says about the drafts of its request: the answer that it expects, and the drafters that it wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvasir.errors import InvalidRequest
from kvasir.speculation import Speculation, wanted

if TYPE_CHECKING:
    from kvasir.engine.front import Front

Prediction = str | Sequence[int] | Mapping[str, Any]
Choice = Speculation | Mapping[str, Any]


async def draft_fields(front: Front, prediction: Prediction | None, speculation: Choice | None) -> dict[str, Any]:
    """The fields of an engine request.

    prediction: the expected answer as text, as ids, or in OpenAI's form {"type": "content", "content": text or
    [{"type": "text", "text": ...}]}. Texts that look like control tokens are text. speculation: as requests send it,
    {"method": ..., "num_speculative_tokens": ...}. Raises InvalidRequest, TextTooLong, QueueFull.
    """
    found: dict[str, Any] = {}
    if prediction is not None:
        found["prediction"] = await _ids(front, prediction)
    if speculation is not None:
        found["speculation"] = speculation if isinstance(speculation, Speculation) else wanted(speculation)
    return found


def predictions_of(given: Any, count: int) -> list[Prediction | None]:
    """One prediction for each of `count` prompts: `given` for a single prompt, or a list of as many. Raises
    InvalidRequest."""
    if given is None:
        return [None] * count
    several = isinstance(given, Sequence) and not isinstance(given, str)
    listed = list(given) if several and not all(isinstance(one, int) for one in given) else [given]
    if len(listed) != count:
        message = f"{count} prompts and {len(listed)} predictions"
        raise InvalidRequest(message, "give one or None for each prompt", param="prediction")
    return listed


async def _ids(front: Front, prediction: Prediction) -> tuple[int, ...]:
    match prediction:
        case str() as text:
            pass
        case {"type": "content", "content": str(text)}:
            pass
        case {"type": "content", "content": [*parts]} if all(isinstance(_text(part), str) for part in parts):
            text = "".join(_text(part) for part in parts)
        case [*ids] if all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            return tuple(ids)
        case _:
            hint = 'give a text, ids, or {"type": "content", "content": a text}'
            raise InvalidRequest(f"a prediction of type {type(prediction).__name__}", hint, param="prediction")
    [ids] = await front.encode_parts([text], param="prediction")
    return ids


def _text(part: Any) -> Any:
    return part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
