"""The request bodies of Text Generation Inference. Extensions: `model`, and the fields of Drafting."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kvasir.fields import MAX_STOP_STRINGS
from kvasir.serve.conversation.drafting import Drafting
from kvasir.serve.conversation.sampling import wire_of
from kvasir.serve.http.wire import Name, Refused, Wire


class Grammar(Wire):
    """value: a JSON schema as an object or as text, {"schema": ...}, or a regular expression."""

    type: Literal["json", "json_schema", "regex"]
    value: dict[str, Any] | str


class Parameters(wire_of("tgi")):
    """Fields of the table are declared here where TGI allows less than other dialects.

    do_sample: without it, sampling is on if temperature, top_k, top_p or typical_p is given, and greedy otherwise.
    truncate: number of tokens to keep from the end of the prompt. best_of: number of choices to generate; the most
    probable one is returned first. top_n_tokens: candidates per token in `details`. adapter_id: an adapter's name."""

    REFUSED: ClassVar[Refused] = {
        "watermark": ((False,), "this server adds no watermark"),
    }

    best_of: Annotated[int, Field(ge=1)] | None = None
    decoder_input_details: bool | None = None
    details: bool | None = None
    do_sample: bool | None = None
    grammar: Grammar | None = None
    max_new_tokens: int | None = None
    return_full_text: bool | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    stop: Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Annotated[float, Field(gt=0)] | None = None
    top_k: Annotated[int, Field(gt=0)] | None = None
    top_n_tokens: Annotated[int, Field(ge=0)] | None = None
    truncate: Annotated[int, Field(ge=1)] | None = None

    adapter_id: Name | None = None
    watermark: bool | None = None


class GenerateRequest(Drafting):
    """POST /generate and /generate_stream"""

    model: Name | None = None
    inputs: str
    parameters: Parameters | None = None


class CompatGenerateRequest(GenerateRequest):
    """POST /"""

    stream: bool | None = None
