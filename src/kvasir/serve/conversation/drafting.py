"""Drafts of a request: which drafters it wants, and the answer that its client expects. No draft changes a token."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from kvasir.errors import quoted
from kvasir.serve.conversation.scheduling import Scheduling
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.wire import MAX_PARTS, Wire
from kvasir.speculation import MAX_DRAFTED, Speculation, wanted


class SpeculationChoice(Wire):
    """method: a drafter's name, a list of names, "auto" or "off". num_speculative_tokens: drafted ids of a step, at
    most."""

    method: str | Annotated[list[str], Field(max_length=16)] | None = None
    num_speculative_tokens: Annotated[int, Field(ge=0)] | None = None


class Drafting(Scheduling):
    """speculation: which of the engine's drafters propose ids for this request, and how many at most; see
    docs/speculation.md."""

    speculation: SpeculationChoice | None = None


def speculation_of(wire: Drafting, most: int | None = None) -> dict[str, Any]:
    """The field of an engine request that says which drafts it gets; none if the engine decides. most: drafted ids of a
    step, by a field of the dialect; the smaller number holds if both give one. Raises InvalidRequest."""
    if (choice := wire.speculation) is None and most is None:
        return {}
    found = Speculation()
    if choice is not None:
        found = wanted({"method": choice.method, "num_speculative_tokens": choice.num_speculative_tokens})
    given = [count for count in (found.most, most) if count is not None]
    return {"speculation": replace(found, most=min((*given, MAX_DRAFTED)) if given else None)}


class PredictedPart(Wire):
    type: Literal["text"]
    text: str


def _check_type(value: Any) -> Any:
    """Reports predictions of other types by name."""
    kind = value.get("type", "content") if isinstance(value, dict) else "content"
    if kind != "content":
        message = "a prediction of type {kind} is not supported (expected 'content')"
        raise PydanticCustomError("unsupported", message, {"kind": quoted(kind)})
    return value


class PredictedContent(Wire):
    type: Literal["content"]
    content: str | Annotated[list[PredictedPart], Field(max_length=MAX_PARTS)]


Prediction = Annotated[PredictedContent, BeforeValidator(_check_type)]


async def prediction_of(prediction: PredictedContent | None, serving: Serving) -> dict[str, Any]:
    """The field of an engine request that has the ids of an expected answer. Texts that look like control tokens are
    text. Raises InvalidRequest, TextTooLong, QueueFull."""
    if prediction is None:
        return {}
    content = prediction.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    [ids] = await serving.front.encode_parts([text], param="prediction")
    return {"prediction": ids}
