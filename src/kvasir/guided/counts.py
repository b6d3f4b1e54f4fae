"""Rewrites keywords that count: for few items or few keys, lists all combinations (see cases)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, permutations
from math import comb, perm
from typing import Any

from kvasir.guided.apart import apart, flat
from kvasir.guided.logic import KINDS, MAX_CASES, NOTES, Scope, also, negated, same, types_of
from kvasir.guided.texts import Unknown, spelt_out

_MAX_ITEMS, _MAX_WAYS = 16, 100


# -- arrays ----------------------------------------------------------------------------------------------------------


def contains(node: dict[str, Any], scope: Scope) -> None:
    """Rewrites `contains`, `minContains` and `maxContains`. Raises Unknown."""
    wanted = node.pop("contains")
    least, most = node.pop("minContains", 1), node.pop("maxContains", None)
    if most is not None and most < least:
        also(node, {"type": types_of(KINDS - {"array"})})
        return
    if wanted is False and least > 0:
        also(node, {"type": types_of(KINDS - {"array"})})
        return
    if wanted is True or wanted == {}:
        also(node, {"minItems": least} | ({"maxItems": most} if most is not None else {}))
        return
    if least > 0:
        also(node, _at_least(wanted, least, node))
    if most is not None:
        also(node, _at_most(wanted, most, node, scope))


def _size(node: Mapping[str, Any]) -> int:
    """The highest number of items. Raises Unknown if there is no small bound."""
    most = node.get("maxItems")
    if most is None and (node.get("items") is False or node.get("additionalItems") is False):
        prefix = node.get("prefixItems", node.get("items"))
        most = len(prefix) if isinstance(prefix, list) else 0
    if not isinstance(most, int) or most > _MAX_ITEMS:
        raise Unknown("without a small maxItems")
    return most


def _at_least(wanted: Any, least: int, node: Mapping[str, Any]) -> Any:
    size = _size(node)
    if comb(size, least) > MAX_CASES:
        raise Unknown("too many cases")
    ways = [
        {"prefixItems": [wanted if i in places else True for i in range(places[-1] + 1)], "minItems": places[-1] + 1}
        for places in combinations(range(size), least)
    ]
    return {"anyOf": ways} if ways else {"type": types_of(KINDS - {"array"})}


def _at_most(wanted: Any, most: int, node: Mapping[str, Any], scope: Scope) -> Any:
    other = negated(wanted, scope)
    if most == 0:
        return {"items": other}
    size = _size(node)
    if size <= most:
        return True
    if comb(size, most) > MAX_CASES:
        raise Unknown("too many cases")
    return {
        "anyOf": [
            {"prefixItems": [True if i in places else other for i in range(size)]}
            for places in combinations(range(size), most)
        ]
    }


def unique_items(node: dict[str, Any], scope: Scope) -> None:
    """Rewrites `uniqueItems`. Raises Unknown."""
    if node.pop("uniqueItems") is not True or node.get("maxItems", 2) < 2:
        return
    kinds = node.get("type", ["array"])
    if "array" not in ([kinds] if isinstance(kinds, str) else kinds):
        return
    prefix, items = node.get("prefixItems", []), node.get("items", True)
    if isinstance(items, list):
        prefix, items = items, node.get("additionalItems", True)
    if items is False and all(apart(a, b, scope) for a, b in combinations(prefix, 2)):
        return
    values = None if prefix else _values(items, scope)
    if values is None:
        raise Unknown("too many items")
    counts = range(node.get("minItems", 0), min(node.get("maxItems", len(values)), len(values)) + 1)
    if sum(perm(len(values), n) for n in counts) > _MAX_WAYS:
        raise Unknown("too many items")
    ways = [list(way) for n in counts for way in permutations(values, n)]
    kept = {key: value for key, value in node.items() if key not in ("items", "minItems", "maxItems", "type")}
    others = [{"type": t} for t in ([kinds] if isinstance(kinds, str) else kinds) if t != "array"]
    if "type" not in node:
        others = [{"type": types_of(KINDS - {"array"})}]
    node.clear()
    node.update(kept)
    also(node, {"anyOf": [*others, {"enum": ways}]} if others else {"enum": ways})


def _values(schema: Any, scope: Scope) -> list[Any] | None:
    """All values of a schema; None unless they are few and can be listed."""
    if not isinstance(schema, dict):
        return None
    if isinstance(schema.get("$ref"), str) and not set(schema) - NOTES - {"$ref"}:
        return _values(scope.find(schema["$ref"]), scope)
    if schema.get("type") == "boolean" and not set(schema) - NOTES - {"type"}:
        return [True, False]
    if set(schema) - NOTES - {"enum", "const", "type"} or not {"enum", "const"} & set(schema):
        return None
    found: list[Any] = []
    for case in flat(schema, scope):
        for value in case.values or ():
            if not apart({"const": value}, schema, scope) and not any(same(value, one) for one in found):
                found.append(value)
    return found if len(found) <= 8 else None


_TWICE = "duplicate keys would be counted twice"

# -- objects ------------------------------------------------------------------------------------------------------


def properties(node: dict[str, Any], scope: Scope) -> None:
    """Rewrites minProperties and maxProperties, which llguidance does not support next to optional keys."""
    named = {name: one for name, one in node.get("properties", {}).items() if one is not False}
    required = list(dict.fromkeys(node.get("required", ())))
    optional = [name for name in named if name not in required]
    least, most = node.get("minProperties", 0), node.get("maxProperties")
    if not optional or "patternProperties" in node:
        if least > len(required) + 1:
            raise Unknown(_TWICE)
        return
    if node.get("additionalProperties") is False:
        node.pop("minProperties", None)
        node.pop("maxProperties", None)
        missing = least - len(required)
        if missing > 0:
            also(node, _choice(optional, missing, lambda some: {"required": list(some)}))
        if most is not None and most - len(required) < len(optional):
            also(node, _choice(optional, max(0, most - len(required)), lambda some: _only(optional, some)))
        if most is not None and most < len(required):
            also(node, {"type": types_of(KINDS - {"object"})})
        return
    if most is None and least == len(required) + 1:  # one more key, a named or a free one
        none = {**_only(optional, ()), "minProperties": node.pop("minProperties")}
        also(node, {"anyOf": [*({"required": [name]} for name in optional), none]})
        return
    if len(optional) > 4:
        raise Unknown("too many cases")
    counts = {key: node.pop(key) for key in ("minProperties", "maxProperties") if key in node}
    ways = [some for n in range(len(optional) + 1) for some in combinations(optional, n)]
    if any(least - len(required) - len(some) > 1 for some in ways):
        raise Unknown(_TWICE)
    also(node, {"anyOf": [{**_only(optional, some), "required": [*required, *some], **counts} for some in ways]})


def _choice(names: Sequence[str], count: int, way: Any) -> Any:
    if comb(len(names), count) > MAX_CASES:
        raise Unknown("too many cases")
    # `combinations` allocates `count` items even if there are fewer names.
    count = min(count, len(names) + 1)
    ways = [way(some) for some in combinations(names, count)]
    return {"anyOf": ways} if ways else {"type": types_of(KINDS - {"object"})}


def _only(names: Sequence[str], some: Sequence[str]) -> dict[str, Any]:
    return {"properties": {name: False for name in names if name not in some}}


def property_names(node: dict[str, Any], scope: Scope) -> None:
    """Rewrites `propertyNames`. Raises Unknown."""
    schema = node.pop("propertyNames")
    for _ in range(8):
        if isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and not set(schema) - NOTES - {"$ref"}:
            schema = scope.find(schema["$ref"])
    if schema is True:
        return
    if schema is False:
        also(node, {"properties": {}, "additionalProperties": False})
        return
    schema = {key: value for key, value in schema.items() if key not in NOTES and (key, value) != ("type", "string")}
    if not schema:
        return
    names = schema.get("enum", [schema["const"]] if "const" in schema else spelt_out(schema.get("pattern", "")))
    if names is not None and len(schema) == 1:
        texts = [name for name in names if isinstance(name, str)]
        also(node, {"properties": dict.fromkeys(texts, True), "additionalProperties": False})
        return
    _by_pattern(node, schema)


def _by_pattern(node: dict[str, Any], schema: Mapping[str, Any]) -> None:
    """Constrains free keys only, since named keys are not matched against a pattern here."""
    free = node.get("additionalProperties", True)
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if set(schema) <= {"minLength", "maxLength"}:
        pattern = f"^(?s:.{{{least},{most}}})$"
    elif set(schema) == {"pattern"}:
        pattern = schema["pattern"]
    else:
        raise Unknown("a name has more than one condition")
    if node.get("properties") or node.get("required") or "patternProperties" in node or _chosen(node):
        raise Unknown("it is combined with other keywords of objects")
    if free is not False:
        node["patternProperties"] = {pattern: free}
    node["additionalProperties"] = False


def _chosen(node: Mapping[str, Any]) -> bool:
    return any(key in node for key in ("allOf", "anyOf", "oneOf", "$ref", "enum", "const", "not", "if"))
