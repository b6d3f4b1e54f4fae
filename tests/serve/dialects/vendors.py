"""What the vendors' own clients know: every field of the bodies they send, with a value for each, and of the answers
they read."""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import typing_extensions
from pydantic import BaseModel
from pydantic.fields import FieldInfo

Path = tuple[str | int, ...]
Field = tuple[type, str]  # the vendor's type, and the name of a field of it
TEXT = "x"

_SCALARS: dict[Any, list[Any]] = {
    str: [TEXT],
    int: [1],
    float: [1.0],
    bool: [False, True],
    object: [{TEXT: TEXT}],
    Any: [TEXT],
    bytes: ["eA=="],
    datetime: ["2026-01-01T00:00:00Z"],
}
_NEEDED = (typing.Required, typing_extensions.Required)
_WRAPPERS = (typing.Annotated, typing.Required, typing.NotRequired)
_MANY = (list, tuple, set, collections.abc.Iterable, collections.abc.Sequence)


def fields_of(kind: type) -> dict[str, tuple[Any, bool]]:
    """By the name on the wire: the annotation, and whether it is needed."""
    if issubclass(kind, BaseModel):
        return {_alias(f) or n: (f.annotation, f.is_required()) for n, f in kind.model_fields.items()}
    hints = typing_extensions.get_type_hints(kind, include_extras=True)
    if dataclasses.is_dataclass(kind):
        return {f.name: (hints[f.name], f.default is dataclasses.MISSING) for f in dataclasses.fields(kind)}
    needed: frozenset[str] = kind.__required_keys__  # type: ignore[attr-defined]
    return {_wire_name(h, n): (h, n in needed or typing.get_origin(h) in _NEEDED) for n, h in hints.items()}


def _alias(field: FieldInfo) -> str | None:
    return field.serialization_alias or field.alias


def _wire_name(hint: Any, name: str) -> str:
    """Annotated[..., PropertyInfo(alias=...)] is how the clients spell what is no name in Python."""
    for part in typing.get_args(hint):
        if alias := getattr(part, "alias", None) or (_wire_name(part, "") if typing.get_args(part) else ""):
            return alias
    return name


def is_object(kind: Any) -> bool:
    if not isinstance(kind, type):
        return False
    return typing_extensions.is_typeddict(kind) or issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind)


def branches(annotation: Any) -> Iterator[Any]:
    """The kinds of value that an annotation allows, unions and wrappers opened; None is left out."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        for argument in arguments:
            yield from branches(argument)
    elif origin in _WRAPPERS:
        yield from branches(arguments[0])
    elif hasattr(annotation, "__supertype__"):
        yield from branches(annotation.__supertype__)
    elif isinstance(annotation, typing.TypeVar):
        yield from branches(annotation.__bound__ or str)
    elif annotation is not type(None) and annotation is not None:
        yield annotation


def simplest(annotation: Any, given: Mapping[str, Any]) -> Any:
    """One value of this kind, with no more than it needs and what is given: by the name of a field, or of a type and
    its field."""
    for kind in branches(annotation):
        return next(_values(kind, given))
    return None


def _values(kind: Any, given: Mapping[str, Any]) -> Iterator[Any]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        yield from arguments
    elif is_object(kind):
        yield {
            name: value if (value := _given(kind, name, given)) is not None else simplest(annotation, given)
            for name, (annotation, needed) in fields_of(kind).items()
            if needed or name == "type" or _given(kind, name, given) is not None
        }
    elif _is_many(kind):
        inner = arguments[0] if arguments else Any
        yield [simplest(inner, given)]
    elif (origin or kind) in (dict, collections.abc.Mapping):
        yield {TEXT: simplest(arguments[1], given) if len(arguments) > 1 else TEXT}
    else:
        yield from _SCALARS.get(kind, [TEXT])


def _given(kind: type, name: str, given: Mapping[str, Any]) -> Any:
    return given.get(f"{kind.__name__}.{name}", given.get(name))


def _is_many(kind: Any) -> bool:
    origin = typing.get_origin(kind) or kind
    return origin in _MANY or getattr(origin, "__name__", "") == "SequenceNotStr"


@dataclass(frozen=True, slots=True)
class Asked:
    """A body that has this field and little else. kind: of the object that the field is set to, or to a list of."""

    field: Field
    path: Path
    body: dict[str, Any]
    kind: type | None = None


def filled(
    kind: type, given: Mapping[str, Any], closed: Collection[type], seen: set[Field], at: Path = ()
) -> Iterator[Asked]:
    """Each field of an object and of those in it, once for each kind of value that it may have; those of the kinds in
    `closed`, which may grow meanwhile, are left out."""
    base = simplest(kind, given)
    for name, (annotation, _) in fields_of(kind).items():
        if (kind, name) in seen:
            continue
        seen.add((kind, name))
        for branch in branches(annotation):
            if not is_object(branch):
                own = _given(kind, name, given)
                for value in _values(branch, given) if own is None else [own]:
                    yield Asked((kind, name), (*at, name), base | {name: value})
            depth, inner = 0, [branch]
            while _is_many(inner[0]) and typing.get_args(inner[0]):
                depth, inner = depth + 1, list(branches(typing.get_args(inner[0])[0]))
            place = (*at, name, *[0] * depth)
            for item in filter(is_object, inner):
                yield Asked((kind, name), place, base | {name: _listed(simplest(item, given), depth)}, item)
                if item not in closed:
                    for asked in filled(item, given, closed, seen, place):
                        body = base | {name: _listed(asked.body, depth)}
                        yield Asked(asked.field, asked.path, body, asked.kind)


def _listed(value: Any, depth: int) -> Any:
    return value if not depth else [_listed(value, depth - 1)]


def found_in(kind: Any, answer: Any, found: dict[Field, bool]) -> None:
    """Notes for each field of the vendor's type whether the answer has it; null counts as having it."""
    for branch in branches(kind):
        if _is_many(branch) and isinstance(answer, list):
            for item in answer:
                found_in(typing.get_args(branch)[0], item, found)
        elif is_object(branch) and isinstance(answer, dict) and _is_it(branch, answer):
            for name, (annotation, _) in fields_of(branch).items():
                key = (branch, name)
                found[key] = found.get(key, False) or name in answer
                if answer.get(name) is not None:
                    found_in(annotation, answer[name], found)


def _is_it(kind: type, answer: Mapping[str, Any]) -> bool:
    """Whether an answer may be one of this kind of a union, by what it says of its type."""
    annotation = fields_of(kind).get("type", (None, False))[0]
    allowed = [v for b in branches(annotation) for v in typing.get_args(b) if typing.get_origin(b) is typing.Literal]
    return not allowed or answer.get("type") in allowed
