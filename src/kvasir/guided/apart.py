"""Whether two schemas have a value in common. If this cannot be decided, they count as having one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvasir.guided.logic import KEYWORDS, KINDS, MAX_CASES, MAX_DEPTH, Scope, kind_of, kinds_of, negated, same
from kvasir.guided.texts import Unknown, found_in, prefix, spelt_out


@dataclass(frozen=True)
class Flat:
    """One case of a schema: conditions that its values must meet. Further conditions may apply."""

    kinds: frozenset[str] = KINDS
    values: tuple[Any, ...] | None = None
    properties: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    closed: tuple[frozenset[str], ...] = ()  # each: the only keys allowed
    patterns: tuple[str, ...] = ()
    low: float = float("-inf")
    high: float = float("inf")
    items: tuple[int, float] = (0, float("inf"))
    length: tuple[int, float] = (0, float("inf"))


def flat(schema: Any, scope: Scope, depth: int = 0) -> list[Flat]:
    """The cases of a schema; every valid value meets at least one of them. Keywords that are not analyzed are
    ignored."""
    scope.spend()
    if schema is False:
        return []
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return [Flat()]
    cases = [_own(schema)]
    for key, constraint in schema.items():
        try:
            if key == "$ref":
                cases = _both(cases, flat(scope.find(constraint), scope, depth + 1))
            elif key == "allOf":
                for one in constraint:
                    cases = _both(cases, flat(one, scope, depth + 1))
            elif key in ("anyOf", "oneOf"):
                cases = _both(cases, [case for one in constraint for case in flat(one, scope, depth + 1)])
            elif key == "not":
                cases = _both(cases, flat(negated(constraint, scope, depth + 1), scope, depth + 1))
        except Unknown:
            continue
    return cases


def _both(some: list[Flat], others: list[Flat]) -> list[Flat]:
    if len(some) * len(others) > MAX_CASES:
        return some
    return [_and(a, b) for a in some for b in others]


def _and(a: Flat, b: Flat) -> Flat:
    keys = dict.fromkeys([*a.properties, *b.properties])
    values = a.values if b.values is None else b.values
    if a.values is not None and b.values is not None:
        values = tuple(value for value in a.values if any(same(value, other) for other in b.values))
    return Flat(
        a.kinds & b.kinds,
        values,
        {key: (*a.properties.get(key, ()), *b.properties.get(key, ())) for key in keys},
        a.required | b.required,
        (*a.closed, *b.closed),
        (*a.patterns, *b.patterns),
        max(a.low, b.low),
        min(a.high, b.high),
        (max(a.items[0], b.items[0]), min(a.items[1], b.items[1])),
        (max(a.length[0], b.length[0]), min(a.length[1], b.length[1])),
    )


def _own(schema: Mapping[str, Any]) -> Flat:
    """The schema's own conditions, without those of subschemas that apply to the same value."""
    case = Flat(kinds_of(schema["type"])) if isinstance(schema.get("type"), str | list) else Flat()
    if "const" in schema:
        case = replace(case, values=(schema["const"],))
    if isinstance(schema.get("enum"), list):
        case = _and(case, Flat(values=tuple(schema["enum"])))
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    required = schema.get("required")
    closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    pattern = schema.get("pattern")
    return replace(
        case,
        properties={name: (one,) for name, one in properties.items()},
        required=frozenset(required if isinstance(required, list) else ()),
        closed=(frozenset(properties),) if closed else (),
        patterns=(pattern,) if isinstance(pattern, str) else (),
        low=_number(schema.get("minimum"), float("-inf")),
        high=_number(schema.get("maximum"), float("inf")),
        items=(_number(schema.get("minItems"), 0), _number(schema.get("maxItems"), float("inf"))),
        length=(_number(schema.get("minLength"), 0), _number(schema.get("maxLength"), float("inf"))),
    )


def _number(constraint: Any, otherwise: Any) -> Any:
    return constraint if isinstance(constraint, int | float) and not isinstance(constraint, bool) else otherwise


def apart(a: Any, b: Any, scope: Scope, depth: int = 0) -> bool:
    """Whether it is certain that no value is valid for both schemas."""
    return not shared(a, b, scope, depth)


def shared(a: Any, b: Any, scope: Scope, depth: int = 0) -> frozenset[str]:
    """The kinds of values that may be valid for both schemas."""
    if depth > MAX_DEPTH:
        return KINDS
    found: set[str] = set()
    for x in _known(a, scope, depth):
        for y in _known(b, scope, depth):
            found |= _shared(x, y, scope, depth + 1)
    return frozenset(found)


def _known(schema: Any, scope: Scope, depth: int) -> list[Flat]:
    """`flat`, computed once for each schema."""
    if id(schema) not in scope.seen:
        scope.seen[id(schema)] = (
            schema,
            flat(schema, scope, depth),
        )  # the schema is kept, so that its id stays unique
    return scope.seen[id(schema)][1]


def _shared(a: Flat, b: Flat, scope: Scope, depth: int) -> set[str]:
    scope.spend()
    both = _and(a, b)
    if both.values is not None:
        return {kind_of(value) for value in both.values if not _not_of(value, both)}
    return {kind for kind in both.kinds if not _none(kind, a, b, both, scope, depth)}


def constants(schema: Any, scope: Scope) -> list[Any] | None:
    """A list that includes every value of the schema; None if its values cannot be listed."""
    cases = flat(schema, scope)
    if any(case.values is None for case in cases):
        return None
    found: list[Any] = []
    for case in cases:
        found += [v for v in case.values or () if not _not_of(v, case) and not any(same(v, other) for other in found)]
    return found


_OF_KIND = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "fraction": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "contains", "minContains", "maxContains", "minItems", "maxItems", "uniqueItems",
              "additionalItems", "unevaluatedItems"),
    "object": ("required", "properties", "patternProperties", "additionalProperties", "propertyNames", "dependencies",
               "dependentRequired", "dependentSchemas", "minProperties", "maxProperties", "unevaluatedProperties"),
}  # fmt: skip
_OF_ANY = KEYWORDS - {"type"} - {key for keys in _OF_KIND.values() for key in keys}


def has_all(schema: Any, kind: str) -> bool:
    """Whether a schema certainly allows all values of a kind."""
    if not isinstance(schema, dict):
        return schema is True
    if "type" in schema and kind not in kinds_of(schema["type"]):
        return False
    return not set(schema) & (_OF_ANY | set(_OF_KIND.get(kind, ())))


def holds(schema: Any, value: Any, scope: Scope, depth: int = 0) -> bool:
    """Whether a string, number, boolean or null is valid for a schema. Raises Unknown."""
    scope.spend()
    if isinstance(schema, bool):
        return schema
    if depth > MAX_DEPTH or isinstance(value, list | dict):
        raise Unknown("a schema that is nested too deeply")
    kind = kind_of(value)
    spoken = {
        key for key in schema if key in KEYWORDS and (key == "type" or key in _OF_ANY or key in _OF_KIND.get(kind, ()))
    }
    return all(_holds(key, schema[key], value, scope, depth + 1) for key in spoken)


def _holds(key: str, constraint: Any, value: Any, scope: Scope, depth: int) -> bool:
    match key:
        case "type":
            return kind_of(value) in kinds_of(constraint)
        case "const":
            return same(constraint, value)
        case "enum":
            return any(same(one, value) for one in constraint)
        case "$ref":
            return holds(scope.find(constraint), value, scope, depth)
        case "not":
            return not holds(constraint, value, scope, depth)
        case "allOf" | "anyOf" | "oneOf":
            count = sum(holds(one, value, scope, depth) for one in constraint)
            return {"allOf": count == len(constraint), "anyOf": count > 0, "oneOf": count == 1}[key]
        case "minLength":
            return len(value) >= constraint
        case "maxLength":
            return len(value) <= constraint
        case "pattern":
            return found_in(constraint, value)
        case "minimum":
            return value >= constraint
        case "maximum":
            return value <= constraint
        case "exclusiveMinimum" if not isinstance(constraint, bool):
            return value > constraint
        case "exclusiveMaximum" if not isinstance(constraint, bool):
            return value < constraint
    raise Unknown(key)


def _none(kind: str, a: Flat, b: Flat, both: Flat, scope: Scope, depth: int) -> bool:
    """Whether no value of the kind can meet both cases."""
    match kind:
        case "string":
            return both.length[0] > both.length[1] or _unlike_texts(both.patterns)
        case "integer" | "fraction":
            return both.low > both.high
        case "array":
            return both.items[0] > both.items[1]
        case "object":
            if any(not both.required <= names for names in both.closed):
                return True
            return any(
                apart(one, other, scope, depth)
                for key in both.required
                for one in a.properties.get(key, ())
                for other in b.properties.get(key, ())
            ) or any(flat(one, scope, depth) == [] for key in both.required for one in both.properties.get(key, ()))
    return False


def _unlike_texts(patterns: Sequence[str]) -> bool:
    """Whether it is certain that no text matches all of these patterns."""
    for i, one in enumerate(patterns):
        texts = spelt_out(one)
        for other in patterns[i + 1 :]:
            if texts is not None and (others := spelt_out(other)) is not None and not set(texts) & set(others):
                return True
            p, q = prefix(one), prefix(other)
            if not (p.startswith(q) or q.startswith(p)):
                return True
    return False


def _not_found(pattern: str, text: str) -> bool:
    try:
        return not found_in(pattern, text)
    except Unknown:
        return False


def _not_of(value: Any, case: Flat) -> bool:
    """Whether a value certainly does not meet a case."""
    if kind_of(value) not in case.kinds:
        return True
    match value:
        case str():
            if not case.length[0] <= len(value) <= case.length[1]:
                return True
            return any(_not_found(pattern, value) for pattern in case.patterns)
        case int() | float() if not isinstance(value, bool):
            return not case.low <= value <= case.high
        case list():
            return not case.items[0] <= len(value) <= case.items[1]
        case dict():
            return not case.required <= value.keys() or any(not value.keys() <= names for names in case.closed)
    return False
