"""Base of the wire models of all dialects: strict types, no unknown fields, bounded containers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from kvasir.errors import InvalidRequest

MAX_MESSAGES = 16384
MAX_PARTS = 1024
MAX_TOOLS = 1024
MAX_KWARGS = 32
MAX_KWARG_CHARS = 1024
LEAVE_OUT = "leave it out"


Refused = Mapping[str, tuple[tuple[Any, ...], str]]  # field -> (values without effect, hint)


class Wire(BaseModel):
    """A JSON object from a client. Unknown fields are refused, and types are not coerced.

    All fields are implemented except those in REFUSED, which `refuse_fields` checks, and those in IGNORED: accepted,
    since they have no meaning for this server and ignoring them misleads no client.
    """

    REFUSED: ClassVar[Refused] = {}
    IGNORED: ClassVar[tuple[str, ...]] = ()

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


def check_text_or_list(value: Any) -> Any:
    """A string or a list of strings."""
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value)):
        return value
    raise PydanticCustomError("text_or_list", "expected a string or a list of strings")


def check_prompts(value: Any) -> Any:
    """A text, token ids, or a list of texts and lists of ids."""
    if isinstance(value, str) or _are_ids(value):
        return value
    if isinstance(value, list) and value and all(isinstance(v, str) or _are_ids(v) for v in value):
        return value
    raise PydanticCustomError(
        "prompts", "expected a string, a list of token ids, or a list of strings and lists of token ids"
    )


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_id, value))


def _is_id(value: Any) -> bool:
    return type(value) is int


def check_kwargs(value: Any) -> Any:
    """A flat object of scalars: the variables of a chat template."""
    if not isinstance(value, dict) or len(value) > MAX_KWARGS:
        raise PydanticCustomError("kwargs", "expected an object of at most {n} entries", {"n": MAX_KWARGS})
    for name, item in value.items():
        scalar = item is None or isinstance(item, bool | int | float | str)
        if len(name) > 64 or not scalar or (isinstance(item, str) and len(item) > MAX_KWARG_CHARS):
            raise PydanticCustomError("kwargs", "expected strings, numbers and booleans of moderate size")
        if isinstance(item, int) and not -(2**53) <= item <= 2**53:
            raise PydanticCustomError("kwargs", "an integer is out of range")
    return value


_STRINGS = {"type": "array", "items": {"type": "string"}}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

TextOrList = Annotated[
    Any,
    BeforeValidator(check_text_or_list),
    WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS]}),
]
Prompts = Annotated[
    Any,
    BeforeValidator(check_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                _IDS,
                {"type": "array", "items": {"anyOf": [{"type": "string"}, _IDS]}, "minItems": 1},
            ]
        }
    ),
]
TemplateKwargs = Annotated[
    Any,
    BeforeValidator(check_kwargs),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": ["string", "number", "boolean", "null"]}}),
]
Name = Annotated[str, Field(max_length=1024)]
Salt = Annotated[str, Field(min_length=1, max_length=256)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
TokenIds = Annotated[list[Int32], Field(max_length=1024)]


def prompt_list(prompts: Any) -> list[str | list[int]]:
    """The single prompts of a checked `Prompts` value."""
    return [prompts] if isinstance(prompts, str) or _is_id(prompts[0]) else list(prompts)


def refuse_fields(wire: Wire, place: str = "") -> None:
    """Raises InvalidRequest for fields whose values are not supported. place: of the object in the body."""
    for name, (harmless, hint) in wire.REFUSED.items():
        value = getattr(wire, name)
        if not any(type(value) is type(h) and value == h for h in (None, *harmless)):
            wire_name = type(wire).model_fields[name].alias or name
            param = f"{place}.{wire_name}" if place else wire_name
            raise InvalidRequest(f"{wire_name} is not supported with this value", hint, param=param)


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Makes errors use the client's field names. names: ours -> theirs. In texts, only names with an underscore are
    replaced, since others may be ordinary words."""
    try:
        yield
    except InvalidRequest as error:
        for ours, theirs in names.items():
            if "_" in ours:
                error.message = re.sub(rf"\b{ours}\b", theirs, error.message)
                error.hint = re.sub(rf"\b{ours}\b", theirs, error.hint)
        error.param = names.get(error.param or "", error.param)
        raise
