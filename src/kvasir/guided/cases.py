"""Rewrites a schema without the keywords that llguidance does not support. The result is exactly equivalent: it uses
alternatives, absent keys, the remaining kinds and texts. A keyword that cannot be rewritten is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvasir.errors import InvalidRequest
from kvasir.guided import conditions, counts
from kvasir.guided.apart import constants, flat, has_all, holds, shared
from kvasir.guided.formats import FORMATS
from kvasir.guided.logic import KINDS, MAX_CASES, NOTES, Scope, also, negated, same, types_of
from kvasir.guided.pointers import Pointers
from kvasir.guided.summary import Summary
from kvasir.guided.texts import Unknown, as_ecma

_IN_PLACE = ("const", "enum", "allOf", "anyOf", "oneOf", "$ref")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_ONE = ("items", "additionalItems", "additionalProperties")
_INSIDE = dict.fromkeys((*_MAPS, *_LISTS, *_ONE))
# Most schemas have few keywords: one look at these sets shows whether there is anything to do.
_HAS_INSIDE, _HAS_IN_PLACE = frozenset(_INSIDE), frozenset(_IN_PLACE)
_LONG = 200  # characters of a pattern that is worth a definition
_MOST = 20_000  # schemas in the result


def enforceable(schema: Any, lenient: bool = False, summary: Summary | None = None) -> Any:
    """Rewrites a schema. lenient: keywords that cannot be rewritten are dropped instead of refused (`oneOf` is kept).
    summary: the contents of its schemas, if known. Raises InvalidRequest that names the keyword."""
    if not isinstance(schema, dict):
        return schema
    try:
        pointers = Pointers(schema, summary)
        if pointers.mixed or (pointers.plain and summary and _is_done(summary)):
            return pointers.schema
        return _Cases(pointers, lenient).whole(pointers.schema)
    except RecursionError as error:
        raise InvalidRequest("the schema is nested too deeply", "make it simpler") from error


class _Cases:
    def __init__(self, scope: Pointers, lenient: bool):
        self._scope, self._lenient = scope, lenient
        self._schemas = 0
        self._long: dict[str, list[dict[str, Any]]] = {}  # schemas of each long pattern

    def whole(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Rewrites the root. Long patterns that repeat become definitions, since llguidance reads a definition once."""
        node = self.of(schema)
        named: dict[str, Any] = {}
        for texts in self._long.values():
            if len(texts) > 1 and self._scope.rooted:
                name = self._scope.unused("text", named)
                named[name] = dict(texts[0])
                for text in texts:
                    text.clear()
                    text["$ref"] = f"#/$defs/{name}"
        return {**node, "$defs": {**node.get("$defs", {}), **named}} if named else node

    def of(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        self._schemas += 1
        if self._schemas > _MOST:
            raise InvalidRequest("the schema has too many cases", "make it simpler")
        if _HAS_WORK.isdisjoint(schema):
            return _arranged(schema)
        node = dict(schema)
        if not _HAS_REWRITE.isdisjoint(node):
            for key, rewrite in _REWRITES.items():
                if key in node:
                    self._try(key, rewrite, node)
        if _is_chosen(node):
            del node["anyOf"]
        if not _HAS_INSIDE.isdisjoint(node):
            for key in _INSIDE:
                if key in node:
                    node[key] = self._inside(key, node[key])
        pattern = node.get("pattern")
        if isinstance(pattern, str) and len(pattern) > _LONG and node.keys() <= {"type", "pattern"}:
            self._long.setdefault(f"{node.get('type')} {pattern}", []).append(node)
        return _arranged(node)

    def _inside(self, key: str, constraint: Any) -> Any:
        """The value of a keyword, with the schemas in it rewritten."""
        if isinstance(constraint, list):
            return [self.of(one) for one in constraint] if key in _LISTS else constraint
        if isinstance(constraint, dict) and key in _MAPS:
            return {name: self.of(one) for name, one in constraint.items()}
        return self.of(constraint) if key in _ONE else constraint

    def _try(self, key: str, rewrite: Callable[[dict[str, Any], Scope], None], node: dict[str, Any]) -> None:
        before = dict(node)
        try:
            rewrite(node, self._scope)
        except Unknown as error:
            if not self._lenient and key != "oneOf":  # llguidance handles some oneOf that are not handled here
                message = f"{key}: it cannot be enforced here ({error})"
                raise InvalidRequest(message, "rewrite it, or leave it out") from error
            node.clear()
            node.update({k: v for k, v in before.items() if k != key or key == "oneOf"})  # oneOf is then read as anyOf
        except (TypeError, AttributeError, ValueError, KeyError):  # malformed: llguidance will refuse it
            node.clear()
            node.update(before)


def _arranged(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with all direct keywords of a value in one place: llguidance reads keywords in order, and treats
    direct keywords on both sides of a choice as unrelated."""
    if _is_arranged(tuple(schema)):
        return schema
    pivot = "properties" if "properties" in schema else next(k for k in schema if k not in _IN_PLACE and k not in NOTES)
    direct = {key: value for key, value in schema.items() if key not in _IN_PLACE and key not in NOTES}
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == pivot:
            found |= direct
        elif key not in direct:
            found[key] = value
    return found


def _is_arranged(keys: tuple[str, ...]) -> bool:
    if len(keys) < 3 or _HAS_IN_PLACE.isdisjoint(keys):
        return True
    places = [i for i, key in enumerate(keys) if key not in _IN_PLACE and key not in NOTES]
    return not places or _HAS_IN_PLACE.isdisjoint(keys[places[0] : places[-1]])


def _is_chosen(node: dict[str, Any]) -> bool:
    """Whether one of the choices must hold anyway; llguidance would combine each choice with it."""
    every, options = node.get("allOf"), node.get("anyOf")
    if not isinstance(every, list) or not isinstance(options, list):
        return False
    return any(same(one, option) for one in every for option in options)


def _is_done(summary: Summary) -> bool:
    """Whether there is nothing to rewrite."""
    return all(_HAS_REWRITE.isdisjoint(shape) and _is_arranged(shape) for shape in summary.shapes)


# -- rewrites: each removes its keyword ------------------------------------------------------------------------------


def _not(node: dict[str, Any], scope: Scope) -> None:
    also(node, negated(node.pop("not"), scope))


def _one_of(node: dict[str, Any], scope: Scope) -> None:
    options = node["oneOf"]
    if len(options) > MAX_CASES:
        raise Unknown("too many choices")
    alone = [_alone(one, [o for j, o in enumerate(options) if j != i], scope) for i, one in enumerate(options)]
    place = {key: ("anyOf" if key == "oneOf" else key) for key in node}
    if "anyOf" in node:
        del node["oneOf"]
        also(node, {"anyOf": alone})
        return
    found = {place[key]: (alone if key == "oneOf" else value) for key, value in node.items()}
    node.clear()
    node.update(found)


def _alone(one: Any, others: list[Any], scope: Scope) -> Any:
    """The schema, restricted to values that are invalid for all others."""
    values = constants(one, scope)
    if values is not None and not any(isinstance(value, list | dict) for value in values):
        kept = [v for v in values if holds(one, v, scope) and not any(holds(other, v, scope) for other in others)]
        return {"enum": kept} if kept else False
    taken: set[str] = set()
    excluded: list[Any] = []
    for other in others:
        both = shared(one, other, scope)
        whole = {kind for kind in both if has_all(other, kind)}
        taken |= whole
        if both - whole:
            excluded.append(negated(other, scope, among=_keys(one, scope)))
    if taken:
        excluded.append({"type": types_of(KINDS - taken)})
    return {"allOf": [one, *excluded]} if excluded else one


def _keys(schema: Any, scope: Scope) -> frozenset[str] | None:
    """The only keys that values may have; None for any."""
    cases = flat(schema, scope)
    if not all(case.closed for case in cases):
        return None
    return frozenset().union(*(case.closed[0] for case in cases))


def _dependencies(node: dict[str, Any], scope: Scope) -> None:
    for name in ("dependencies", "dependentRequired", "dependentSchemas"):
        for key, needed in node.pop(name, {}).items():
            then: list[Any] = (
                [{"required": [key, *needed]}] if isinstance(needed, list) else [{"required": [key]}, needed]
            )
            if isinstance(needed, str):
                then = [{"required": [key, needed]}]
            if needed != [] and needed is not True:
                also(node, {"anyOf": [{"properties": {key: False}}, {"allOf": then}]})


def _format(node: dict[str, Any], scope: Scope) -> None:
    constraint = node["format"]
    pattern = FORMATS.get(constraint, "")
    if pattern is None:
        raise Unknown(f"no pattern is known for the format {constraint}")
    if pattern and "pattern" in node:
        also(node, {"pattern": pattern})
    elif pattern:
        node["pattern"] = pattern
    if pattern:
        del node["format"]


def _pattern(node: dict[str, Any], scope: Scope) -> None:
    node["pattern"] = as_ecma(node["pattern"])


def _patterns(node: dict[str, Any], scope: Scope) -> None:
    node["patternProperties"] = {as_ecma(pattern): one for pattern, one in node["patternProperties"].items()}


_REWRITES: dict[str, Callable[[dict[str, Any], Scope], None]] = {
    "format": _format,
    "not": _not,
    "oneOf": _one_of,
    "allOf": conditions.all_of,
    "if": conditions.when,
    "then": lambda node, _: node.pop("then"),
    "else": lambda node, _: node.pop("else"),
    "dependencies": _dependencies,
    "dependentRequired": _dependencies,
    "dependentSchemas": _dependencies,
    "propertyNames": counts.property_names,
    "contains": counts.contains,
    "minContains": lambda node, _: node.pop("minContains"),
    "maxContains": lambda node, _: node.pop("maxContains"),
    "uniqueItems": counts.unique_items,
    "minProperties": counts.properties,
    "maxProperties": counts.properties,
    "pattern": _pattern,
    "patternProperties": _patterns,
}
_HAS_REWRITE = frozenset(_REWRITES)
_HAS_WORK = _HAS_REWRITE | _HAS_INSIDE
