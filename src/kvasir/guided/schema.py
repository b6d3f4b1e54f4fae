"""Prepares a JSON schema: what the library would silently ignore, or get wrong, is rewritten or refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from kvasir.errors import InvalidRequest
from kvasir.guided.bounds import BOUNDS, HINT, PROBLEM, bounds_of, misread
from kvasir.guided.formats import FORMATS
from kvasir.guided.summary import Summary

LARGEST = 2**53  # beyond it, floats do not hold every whole number, and llguidance computes with floats
_MOST, _LEAST = 2**63 - 1, -(2**63) + 1024  # whole numbers that llguidance writes; it clips a bound at the first
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_ONE = (
    *("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"),
    *("not", "if", "then", "else", "contains", "propertyNames"),
)
_NOTES = frozenset(("title", "description", "examples", "default", "$comment", "deprecated", "readOnly", "writeOnly"))
_NUMBERS = (*BOUNDS, "const", "enum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_OLD = {"extends": "allOf", "disallow": "not", "divisibleBy": "multipleOf"}  # keywords of draft 3
_NOTHING = (("uniqueItems", False), ("propertyNames", True), ("nullable", False), ("required", False))
# Most schemas have few keywords: one look at these sets shows whether there is anything to do.
_INSIDE = dict.fromkeys((*_MAPS, *_LISTS, *_ONE))
_HAS_INSIDE, _HAS_COUNTS = frozenset(_INSIDE), frozenset(_COUNTS)
_HAS_NOTHING = frozenset(key for key, _ in _NOTHING)
_HAS_OLD = frozenset(_OLD)
_HAS_BOUNDS, _HAS_NUMBERS = frozenset(BOUNDS), frozenset(_NUMBERS)
_HAS_WRONG = frozenset((*_OLD, *_NUMBERS, "properties", "required", "multipleOf"))
_HAS_WORK = _HAS_INSIDE | _HAS_COUNTS | _HAS_NOTHING | _HAS_WRONG | {"format", "nullable"}


def prepared(schema: Any, lenient: bool = False, summary: Summary | None = None) -> Any:
    """Prepares a schema. lenient: what cannot be enforced is dropped instead of refused. summary: filled in with the
    prepared schemas. Raises InvalidRequest that names the keyword."""
    try:
        return _prepared(dict(schema) if isinstance(schema, Mapping) else schema, lenient, summary or Summary())
    except RecursionError as error:
        raise InvalidRequest("the schema is nested too deeply", "make it simpler") from error


def _prepared(schema: Any, lenient: bool, summary: Summary) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = {key: value for key, value in schema.items() if key not in _NOTES}
    if not _HAS_WORK.isdisjoint(found):
        _work(found, lenient, summary)
    if found.pop("nullable", None) is True:
        found = _or_null(found)
        alternatives = found.get("anyOf")
        for inner in alternatives if isinstance(alternatives, list) else ():
            if isinstance(inner, Mapping):
                summary.add(inner)
    summary.add(found)
    return found


def _work(found: dict[str, Any], lenient: bool, summary: Summary) -> None:
    if not _HAS_NOTHING.isdisjoint(found):
        for key, value in _NOTHING:
            if found.get(key) is value:
                del found[key]
    if isinstance(found.get("format"), str) and found["format"] not in FORMATS:
        del found["format"]  # a format that JSON Schema does not define is an annotation
    if not _HAS_COUNTS.isdisjoint(found):
        for key in _COUNTS:
            if isinstance(found.get(key), float) and found[key].is_integer():
                found[key] = int(found[key])
    if not _HAS_WRONG.isdisjoint(found):
        _mend(found, lenient)
    for key, value in found.items():
        if key in _INSIDE:
            found[key] = _inside(key, value, lenient, summary)
    summary.old = summary.old or _is_old(found)


def _is_old(schema: Mapping[str, Any]) -> bool:
    sides = (schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum"))
    return isinstance(schema.get("items"), list) or any(isinstance(side, bool) for side in sides)


def _mend(schema: dict[str, Any], lenient: bool) -> None:
    if not _HAS_BOUNDS.isdisjoint(schema) and _is_whole(schema):
        _bound(schema)
    for key, problem, hint in _wrong(schema):
        if not lenient:
            raise InvalidRequest(f"{key}: {problem}", hint)
        schema.pop(key, None)  # a keyword may have two problems


def _inside(key: str, value: Any, lenient: bool, summary: Summary) -> Any:
    """The value of a keyword, with the schemas in it prepared."""
    if isinstance(value, list):
        return [_prepared(one, lenient, summary) for one in value] if key in _LISTS else value
    if isinstance(value, dict) and key in _MAPS:
        return {name: _prepared(one, lenient, summary) for name, one in value.items()}
    return _prepared(value, lenient, summary) if key in _ONE else value


def _wrong(schema: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The keywords that cannot be enforced: keyword, problem, hint."""
    wrong: list[tuple[str, str, str]] = []
    if not _HAS_OLD.isdisjoint(schema):
        wrong += [(key, "a keyword of an older JSON Schema draft", f"use {_OLD[key]}") for key in _OLD if key in schema]
    if schema.get("required") is True:
        wrong.append(
            ("required", "true belongs to an older JSON Schema draft", "list the names in the object that has them")
        )
    if not _HAS_NUMBERS.isdisjoint(schema):
        wrong += _wrong_numbers(schema)
    for key in ("const", "enum", "properties", "required"):
        constraint = schema.get(key)
        if constraint is not None and _is_unwritable(
            list(constraint) if key == "properties" and isinstance(constraint, Mapping) else constraint
        ):
            wrong.append((key, "a text has control characters that need \\uXXXX escapes", "leave them out"))
    if not _HAS_BOUNDS.isdisjoint(schema) and (key := misread(bounds_of(schema))):
        wrong.append((key, PROBLEM, HINT))
    multiple = schema.get("multipleOf")
    if isinstance(multiple, int) and multiple > LARGEST:
        wrong.append(("multipleOf", f"{multiple} is beyond 2^53", "use a smaller one"))
    return wrong


def _wrong_numbers(schema: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    whole = _is_whole(schema)
    for key in _NUMBERS:
        constraint = schema.get(key)
        if constraint is None or isinstance(constraint, str):
            continue
        number = _too_large(constraint, whole or key in ("const", "enum"))
        if number is not None and (not whole or (key, number) != ("maximum", _MOST)):
            yield key, f"{number} is beyond 2^53, where numbers are not exact", "use smaller ones, or strings"


def _is_whole(schema: Mapping[str, Any]) -> bool:
    """Whether all numbers of a schema are whole."""
    constraint = schema.get("type")
    kinds = constraint if isinstance(constraint, list) else [constraint]
    return "integer" in kinds and "number" not in kinds


def _too_large(value: Any, whole: bool) -> int | float | None:
    """A number that is too large: the value itself, or a number in it. whole: numbers are constants, or bounds of whole
    numbers."""
    if isinstance(value, str | bool):
        return None
    if isinstance(value, int | float):
        return value if abs(value) > LARGEST and not _is_exact(value, whole) else None
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((number for one in inner if (number := _too_large(one, whole)) is not None), None)


def _is_exact(number: float, whole: bool) -> bool:
    """llguidance keeps a number as a float, and writes it as a whole number or with the fewest digits that identify
    it."""
    if whole:
        return isinstance(number, int) and abs(number) <= _MOST and number == float(number)
    return isinstance(number, float) or (abs(number) < 10**300 and Decimal(repr(float(number))) == number)


def _bound(schema: dict[str, Any]) -> None:
    """Replaces bounds of whole numbers beyond 2^53 by bounds that floats can hold: inclusive, and within 64 bits."""
    sides = (("exclusiveMinimum", "minimum", 1, max), ("exclusiveMaximum", "maximum", -1, min))
    for exclusive, bound, offset, narrower in sides:
        constraint = schema.get(exclusive)
        if isinstance(constraint, int) and not isinstance(constraint, bool) and abs(constraint) >= LARGEST:
            del schema[exclusive]
            schema[bound] = narrower(constraint + offset, schema.get(bound, constraint + offset))
    if isinstance(schema.get("maximum"), int | float) and schema["maximum"] > LARGEST:
        schema["maximum"] = min(schema["maximum"], _MOST)
    if isinstance(schema.get("minimum"), int | float) and schema["minimum"] < -LARGEST:
        schema["minimum"] = max(schema["minimum"], _LEAST)


def _is_unwritable(value: Any) -> bool:
    """Whether a text in the value has characters that cannot be written (see sources)."""
    if isinstance(value, str):
        return _CONTROL.search(value) is not None
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    try:
        return _CONTROL.search("".join(inner)) is not None  # the usual case: only texts
    except TypeError:
        return any(map(_is_unwritable, inner))


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Adds null, as `nullable` does in OpenAPI."""
    kinds = schema.get("type")
    if "const" in schema:
        schema["enum"] = [schema.pop("const")]
    if isinstance(schema.get("enum"), list):
        schema["enum"] = [*schema["enum"], *([] if None in schema["enum"] else [None])]
    if isinstance(kinds, str | list):
        kinds = [kinds] if isinstance(kinds, str) else kinds
        return schema | {"type": [*kinds, *([] if "null" in kinds else ["null"])]}
    if "enum" in schema:
        return schema
    around = {key: schema.pop(key) for key in ("$schema", "$id", "$defs", "definitions") if key in schema}
    return {**around, "anyOf": [schema, {"type": "null"}]}
