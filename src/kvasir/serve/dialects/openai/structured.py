"""Structured output: the fields that request it. `response_format` is OpenAI's, `structured_outputs` is vLLM's.

A structure is enforced, or refused with the keyword that cannot be enforced; `lenient` ignores such keywords instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, Literal

from pydantic import Field

from kvasir.errors import InvalidRequest
from kvasir.serve.http.wire import MAX_TOOLS, Name, Wire, renamed
from kvasir.types import StructuralTag, StructuredOutputs

MAX_CHOICES = 4096
MAX_IDS = 1 << 16  # of allowed_token_ids
MAX_ANSWER = 100_000  # tokens of an answer of allowed ids, which ends by its length
Schema = dict[str, Any] | bool


class JsonSchema(Wire):
    name: Name | None = None
    description: str | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None  # it is always enforced, regardless of this
    lenient: bool | None = None


class Structure(Wire):
    begin: Annotated[str, Field(min_length=1)]
    schema_: Annotated[Schema, Field(alias="schema")]
    end: str = ""


class ResponseFormat(Wire):
    """schema: llama.cpp and others put it next to json_object, or into json_schema without the enclosing object."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    structures: Annotated[list[Structure], Field(max_length=MAX_TOOLS)] | None = None
    triggers: Annotated[list[str], Field(max_length=MAX_TOOLS)] | None = None


class StructuredFields(Wire):
    """Exactly one of them, besides lenient. grammar: Lark, or llama.cpp's GBNF. json: a schema, as an object or as
    text."""

    json_: Annotated[Schema | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MAX_CHOICES)] | None = None
    grammar: str | None = None
    lenient: bool | None = None


class Structured(Wire):
    """The fields shared by completions and chats: OpenAI's and vLLM's, then under the names that vLLM (`guided_...`),
    SGLang (`regex`, `ebnf`, `json_schema`) and llama.cpp (`grammar`, `json_schema`) have for them. At most one is
    given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None

    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=MAX_CHOICES)] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    json_schema: Schema | str | None = None
    allowed_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MAX_IDS)] | None = None


# Other names of a structure -> the field of StructuredOutputs.
_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
}


def _given(wire: Structured) -> list[str]:
    """The fields of a body that ask for a structure."""
    names = ("response_format", "structured_outputs", *_NAMES, "allowed_token_ids")
    return [name for name in names if getattr(wire, name) is not None]


def _of_ids(ids: Sequence[int], wire: Structured) -> StructuredOutputs:
    """Any ids of these, as many as the answer may have: it ends by its length, or with an id that ends answers. Raises
    InvalidRequest."""
    limits = (getattr(wire, name, None) for name in ("max_tokens", "max_completion_tokens"))
    most = min((limit for limit in limits if limit and limit > 0), default=MAX_ANSWER)
    if not ids:
        raise InvalidRequest("allowed_token_ids is empty", "name at least one", param="allowed_token_ids")
    listed = ",".join(map(str, sorted(set(ids))))
    return StructuredOutputs(grammar=f"start: <[{listed}]>{{{min(most, MAX_ANSWER) + 1}}}")


def to_structured(wire: Structured) -> StructuredOutputs | None:
    """The structure that a choice must follow; None if none was requested. Raises InvalidRequest."""
    wanted, own = wire.response_format, wire.structured_outputs
    given = [name for name in _given(wire) if wanted is None or wanted.type != "text" or name != "response_format"]
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(given)} cannot be combined", "send one of them", param=given[-1])
    if given == ["allowed_token_ids"]:
        return _of_ids(wire.allowed_token_ids or (), wire)
    if given and given[0] in _NAMES:
        value: Any = getattr(wire, given[0])
        fields: dict[str, Any] = {_NAMES[given[0]]: tuple(value) if isinstance(value, list) else value}
        return StructuredOutputs(**fields)
    if wanted is not None and wanted.schema_ is not None:
        wanted = _with_schema(wanted)
    if wanted is None or wanted.type == "text":
        return None if own is None else _own(own)
    if wanted.type == "json_object":
        return StructuredOutputs(json_object=True)
    if wanted.type == "json_schema":
        given = wanted.json_schema
        if given is None or given.schema_ is None:
            raise InvalidRequest("the schema is missing", "give json_schema.schema", param="response_format")
        return StructuredOutputs(json=given.schema_, lenient=bool(given.lenient))
    tags = tuple(StructuralTag(s.begin, s.schema_, s.end) for s in wanted.structures or ())
    return StructuredOutputs(tags=tags, triggers=tuple(wanted.triggers or ()))


def _with_schema(wanted: ResponseFormat) -> ResponseFormat:
    """The same format with its schema at the API's place."""
    if wanted.json_schema is not None or wanted.type not in ("json_object", "json_schema"):
        message = "schema is for the types json_object and json_schema, and cannot be combined with json_schema"
        raise InvalidRequest(message, "send it once", param="response_format")
    schema = JsonSchema.model_validate({"schema": wanted.schema_})
    return ResponseFormat(type="json_schema", json_schema=schema)


def _own(wire: StructuredFields) -> StructuredOutputs:
    choice = tuple(wire.choice) if wire.choice is not None else None
    return StructuredOutputs(
        wire.json_, bool(wire.json_object), wire.regex, choice, wire.grammar, lenient=bool(wire.lenient)
    )


def named(wire: Structured, **more: str) -> AbstractContextManager[None]:
    """Makes errors use the client's field names. more: ours=theirs."""
    name = next((name for name in _given(wire) if name != "structured_outputs"), "response_format")
    return renamed(({} if wire.structured_outputs else {"structured_outputs": name}) | more)
