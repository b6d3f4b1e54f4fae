"""Rewrites the negation of a schema. The result is exactly equivalent, or Unknown is raised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, Protocol

from kvasir.guided.texts import Unknown, none_of, unlike

KINDS = frozenset(("null", "boolean", "integer", "fraction", "string", "array", "object"))
NOTES = frozenset((
    *("title", "description", "examples", "default", "$comment", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "id", "$defs", "definitions", "$anchor", "contentMediaType", "contentEncoding"),
))  # fmt: skip
KEYWORDS = frozenset((
    *("type", "const", "enum", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef"),
    *("required", "properties", "patternProperties", "additionalProperties", "propertyNames", "dependencies"),
    *("dependentRequired", "dependentSchemas", "minProperties", "maxProperties", "unevaluatedProperties"),
    *("items", "prefixItems", "additionalItems", "contains", "minContains", "maxContains", "minItems", "maxItems"),
    *("uniqueItems", "unevaluatedItems", "minLength", "maxLength", "pattern", "format", "multipleOf"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "$recursiveRef", "nullable"),
))  # fmt: skip
MAX_CASES = 64
MAX_DEPTH = 12


class Scope(Protocol):
    """The context of a schema."""

    def find(self, reference: Any) -> Any:
        """The schema that a reference points to. Raises Unknown."""
        ...

    def spend(self) -> None:
        """Counts a unit of work. Raises Unknown after too many."""
        ...

    @property
    def seen(self) -> dict[int, tuple[Any, Any]]:
        """Analyzed schemas by id, with the results."""
        ...


def also(node: dict[str, Any], *schemas: Any) -> None:
    """Adds schemas that must also hold to a schema. Raises Unknown if there are too many choices, since llguidance
    lists all their combinations."""
    node["allOf"] = [*node.get("allOf", ()), *schemas]
    choices = [len(one["anyOf"]) for one in (node, *node["allOf"]) if isinstance(one, dict) and one.get("anyOf")]
    if prod(choices) > 2 * MAX_CASES:
        raise Unknown("too many cases")


def kinds_of(types: Any) -> frozenset[str]:
    """The kinds of types; `number` means integers and fractions."""
    types = [types] if isinstance(types, str) else types
    return frozenset(kind for t in types for kind in (("integer", "fraction") if t == "number" else (t,)))


def types_of(kinds: frozenset[str]) -> list[str]:
    """The types of kinds. Raises Unknown for fractions without integers, for which there is no type."""
    if "fraction" in kinds and "integer" not in kinds:
        raise Unknown("numbers that are not integers")
    named = kinds - {"integer", "fraction"}
    number = ["number"] if "fraction" in kinds else ["integer"] if "integer" in kinds else []
    return sorted(named) + number


def kind_of(value: Any) -> str:
    """The kind of a JSON value; floats without a fraction are integers."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "fraction"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def same(a: Any, b: Any) -> bool:
    """Equality as in JSON Schema: 1 equals 1.0, and neither equals true."""
    if kind_of(a) != kind_of(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


# -- not ---------------------------------------------------------------------------------------------------------


def negated(schema: Any, scope: Scope, depth: int = 0, among: frozenset[str] | None = None) -> Any:
    """A schema of all values that are invalid for this schema. among: the only possible keys. Raises Unknown."""
    scope.spend()
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        raise Unknown("a schema that is nested too deeply")
    options: list[Any] = []
    for key, constraint in schema.items():
        if key in KEYWORDS:
            options += _without(key, constraint, schema, scope, depth + 1, among)
    options = [option for option in options if option is not False]
    if len(options) > MAX_CASES:
        raise Unknown("too many cases")
    if True in options:
        return True
    return {"anyOf": options} if len(options) > 1 else options[0] if options else False


def _without(
    key: str, constraint: Any, schema: Mapping[str, Any], scope: Scope, depth: int, among: frozenset[str] | None
) -> list[Any]:
    """The values for which one keyword does not hold, as alternative schemas. Raises Unknown."""

    def no(inner: Any) -> Any:
        return negated(inner, scope, depth)

    match key:
        case "type":
            rest = KINDS - kinds_of(constraint)
            return [{"type": types_of(rest)}] if rest else []
        case "const" | "enum":
            return _others([constraint] if key == "const" else constraint)
        case "not":
            return [constraint]
        case "anyOf":
            return [{"allOf": [no(one) for one in constraint]}]
        case "allOf":
            return [no(one) for one in constraint]
        case "$ref":
            return [negated(scope.find(constraint), scope, depth, among)]
        case "required":
            return [{"type": "object", "properties": {name: False}} for name in constraint]
        case "properties":
            return [_with(name, no(one)) for name, one in constraint.items()]
        case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" if not isinstance(constraint, bool):
            if any(isinstance(schema.get(k), bool) for k in ("exclusiveMinimum", "exclusiveMaximum")):
                raise Unknown(key)  # booleans, as in draft 4
            return [{"type": "number", _BOUNDS[key]: constraint}]
        case "minLength" | "minItems" | "minProperties":
            kind, other = _COUNTED[key]
            return [{"type": kind, other: constraint - 1}] if constraint > 0 else []
        case "maxLength" | "maxItems" | "maxProperties":
            kind, other = _COUNTED[key]
            return [{"type": kind, other: constraint + 1}]
        case "pattern" if isinstance(constraint, str):
            return [{"type": "string", "pattern": unlike(constraint)}]
        case "contains" if not {"minContains", "maxContains"} & set(schema):
            return [{"type": "array", "items": no(constraint)}]
        case "items" if constraint is True or constraint == {}:
            return []
        case "items" if isinstance(constraint, dict) and "prefixItems" not in schema:
            return [{"type": "array", "contains": no(constraint)}]
        case "additionalProperties" if constraint is True or constraint == {}:
            return []
        case "additionalProperties" if constraint is False and among is not None and "patternProperties" not in schema:
            others = sorted(among - set(schema.get("properties", ())))
            return [{"type": "object", "required": [name]} for name in others]
    raise Unknown(key)


_BOUNDS = {
    "minimum": "exclusiveMaximum", "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum", "exclusiveMaximum": "minimum",
}  # fmt: skip
_COUNTED = {
    "minLength": ("string", "maxLength"), "maxLength": ("string", "minLength"),
    "minItems": ("array", "maxItems"), "maxItems": ("array", "minItems"),
    "minProperties": ("object", "maxProperties"), "maxProperties": ("object", "minProperties"),
}  # fmt: skip


def _with(name: str, schema: Any) -> Any:
    return schema and {"type": "object", "properties": {name: schema}, "required": [name]}


def _others(values: Sequence[Any]) -> list[Any]:
    """Schemas that together allow all other values."""
    by_kind: dict[str, list[Any]] = {}
    for value in values:
        kind = kind_of(value)
        by_kind.setdefault("number" if kind in ("integer", "fraction") else kind, []).append(value)
    untouched = types_of(KINDS - kinds_of(list(by_kind)))
    found: list[Any] = [{"type": untouched}] if untouched else []
    for kind, some in by_kind.items():
        match kind:
            case "boolean":
                found += [{"enum": [value]} for value in (True, False) if value not in some]
            case "number" if all(abs(n) <= 2**53 and n == int(n) for n in some):
                found += _between(sorted(set(some)))
            case "null":
                continue
            case "string":
                found.append({"type": "string", "pattern": none_of(some)})
            case "array" | "object" if all(not value for value in some):
                found.append({"type": kind, "minItems" if kind == "array" else "minProperties": 1})
            case _:
                raise Unknown(f"a constant {kind}")
    return found


def _between(numbers: list[float]) -> list[Any]:
    ends = [None, *numbers, None]
    spans = pairwise(ends)
    named = ({"exclusiveMinimum": low, "exclusiveMaximum": high} for low, high in spans)
    return [{"type": "number", **{k: v for k, v in span.items() if v is not None}} for span in named]
