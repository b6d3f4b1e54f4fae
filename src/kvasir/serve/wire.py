"""What wire models of all dialects share: strict types, no unknown fields, bounded containers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from kvasir.errors import InvalidRequest

MAX_MESSAGES = 16384
MAX_PARTS = 1024
MAX_TOOLS = 1024
MAX_KWARGS = 32
MAX_KWARG_CHARS = 1024
LEAVE_OUT = "leave it out"


Refused = Mapping[str, tuple[tuple[Any, ...], str]]  # field -> (values that ask for nothing, what to do)


class Wire(BaseModel):
    """A JSON object from outside. A field that is not declared is refused, a number is not a string.

    Every field is honoured but for those in REFUSED, which `refuse_fields` looks at, and those in IGNORED: accepted,
    since they mean nothing to this server and no one is misled by that.
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
    """A text, token ids, or a list of either."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(map(_is_id, value)) or all(isinstance(v, str) for v in value):
            return value
        if all(isinstance(v, list) and v and all(map(_is_id, v)) for v in value):
            return value
    raise PydanticCustomError(
        "prompts", "expected a string, a list of strings, a list of token ids, or a list of such lists"
    )


def _is_id(value: Any) -> bool:
    return type(value) is int


def check_kwargs(value: Any) -> Any:
    """A flat object of scalars: what a template's switches are."""
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
                {**_STRINGS, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
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
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
TokenIds = Annotated[list[Int32], Field(max_length=1024)]


class Scheduling(Wire):
    """When a request is served, and what it shares.

    service_class: None for the key's. deadline: seconds until which the answer must be complete. cache_salt: requests
    with different ones share no cached prefix; with no_cache none with anybody. cache_ttl: seconds for which the prompt
    is kept.
    """

    service_class: Literal["interactive", "batch", "background"] | None = None
    priority: Int32 | None = None
    deadline: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] | None = None
    cache_salt: Salt | None = None
    no_cache: bool | None = None
    cache_ttl: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] | None = None


class Trust(Wire):
    """trust_special_tokens: what looks like a control token in a conversation is one. It needs the scope
    special_tokens, unless the server allows it for all."""

    trust_special_tokens: bool | None = None


def prompt_list(prompts: Any) -> list[str | list[int]]:
    """The single prompts of a checked `Prompts` value."""
    return [prompts] if isinstance(prompts, str) or _is_id(prompts[0]) else list(prompts)


def refuse_fields(wire: Wire, place: str = "") -> None:
    """Refuses fields that cannot be honoured. place: of the object in the body. Raises InvalidRequest."""
    for name, (harmless, hint) in wire.REFUSED.items():
        value = getattr(wire, name)
        if not any(type(value) is type(h) and value == h for h in (None, *harmless)):
            told = type(wire).model_fields[name].alias or name
            param = f"{place}.{told}" if place else told
            raise InvalidRequest(f"{told} is not supported with this value", hint, param=param)


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name the fields that the client used. names: ours -> theirs. In a text, those are replaced that can be no
    word of the language."""
    try:
        yield
    except InvalidRequest as error:
        for ours, theirs in names.items():
            if "_" in ours:
                error.message = re.sub(rf"\b{ours}\b", theirs, error.message)
                error.hint = re.sub(rf"\b{ours}\b", theirs, error.hint)
        error.param = names.get(error.param or "", error.param)
        raise
