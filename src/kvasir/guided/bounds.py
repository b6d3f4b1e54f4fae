"""Combinations of number bounds that llguidance gets wrong: if one bound is exclusive and a whole number, and the
opposite bound is a fraction next to it, it allows the excluded whole number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

from kvasir.errors import InvalidRequest
from kvasir.guided.pointers import target_of
from kvasir.guided.texts import Unknown

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
HINT = "use an inclusive bound, or another value"
PROBLEM = "the grammar compiler would allow this exclusive bound itself"
_HAS_BOUNDS = frozenset(BOUNDS)
_LARGEST = 2**53
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_INSIDE = ("not", "if", "then", "else")
_DATA = ("const", "enum")
_MOST = 10_000_000


def misread(bounds: Mapping[str, set[float]]) -> str | None:
    """The keyword of an exclusive bound whose own value would be allowed; None if there is none."""
    for key, others in (
        ("exclusiveMinimum", ("maximum", "exclusiveMaximum")),
        ("exclusiveMaximum", ("minimum", "exclusiveMinimum")),
    ):
        opposite = set[float]().union(*(bounds[other] for other in others))
        fractions = (n for n in opposite if n != int(n))
        if any(math.floor(n) in bounds[key] or math.ceil(n) in bounds[key] for n in fractions):
            return key
    return None


def bounds_of(schema: Mapping[str, Any]) -> dict[str, set[float]]:
    """The bounds that one schema sets itself, by keyword."""
    found: dict[str, set[float]] = {}
    for key in BOUNDS:
        bound_value: Any = schema.get(key)
        found[key] = {bound_value} if _is_number(bound_value) and abs(bound_value) <= _LARGEST else set()
    return found


def check_bounds(root: Any) -> None:
    """Raises InvalidRequest if bounds from several places that may apply to one value are misread together."""
    schemas = _all(root)
    if misread(_merged(schemas)) is None:
        return  # the usual case
    visits = count()
    for schema in schemas:
        if any(key in schema for key in (*_IN_PLACE, *_INSIDE, "$ref")):
            joined: dict[int, Mapping[str, Any]] = {}
            _join(schema, root, joined)
            if key := misread(_merged(joined.values())):
                raise InvalidRequest(f"{key}: {PROBLEM}", HINT)
            if next(visits) * len(schemas) > _MOST:
                raise InvalidRequest("the schema has too many cases", "make it simpler")


def _merged(schemas: Iterable[Mapping[str, Any]]) -> dict[str, set[float]]:
    merged: dict[str, set[float]] = {key: set() for key in BOUNDS}
    for schema in schemas:
        if not _HAS_BOUNDS.isdisjoint(schema):
            for key, numbers in bounds_of(schema).items():
                merged[key] |= numbers
    return merged


def _join(schema: Any, root: Any, joined: dict[int, Mapping[str, Any]]) -> None:
    """Collects all schemas that apply to the same value as this schema, by their ids."""
    if not isinstance(schema, Mapping) or id(schema) in joined:
        return
    joined[id(schema)] = schema
    for key in _IN_PLACE:
        for one in schema[key] if isinstance(schema.get(key), list) else ():
            _join(one, root, joined)
    for key in _INSIDE:
        _join(schema.get(key), root, joined)
    _join(_named(schema.get("$ref"), root), root, joined)


def _named(reference: Any, root: Any) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    try:
        return target_of(root, reference)
    except Unknown:
        return None


def _all(root: Any) -> list[Mapping[str, Any]]:
    """All objects in a schema except those in data (`const`, `enum`)."""
    found: list[Mapping[str, Any]] = []
    rest = [root]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            found.append(value)
            rest += [v for k, v in value.items() if isinstance(v, (dict, list)) and k not in _DATA]
        elif isinstance(value, list):
            rest += value
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
