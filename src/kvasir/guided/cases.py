"""Rewrites a schema without the keywords that llguidance does not know. The result is exactly equivalent: it uses
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
from kvasir.guided.said import Said
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


def enforceable(schema: Any, lenient: bool = False, said: Said | None = None) -> Any:
    """Rewrites a schema. lenient: keywords that cannot be rewritten are dropped instead of refused (`oneOf` is kept).
    said: the contents of its schemas, if known. Raises InvalidRequest that names the keyword."""
    if not isinstance(schema, dict):
        return schema
    try:
        pointers = Pointers(schema, said)
        if pointers.mixed or (pointers.plain and said and _is_done(said)):
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
        told = self.of(schema)
        named: dict[str, Any] = {}
        for texts in self._long.values():
            if len(texts) > 1 and self._scope.rooted:
                name = self._scope.unused("text", named)
                named[name] = dict(texts[0])
                for text in texts:
                    text.clear()
                    text["$ref"] = f"#/$defs/{name}"
        return {**told, "$defs": {**told.get("$defs", {}), **named}} if named else told

    def of(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        self._schemas += 1
        if self._schemas > _MOST:
            raise InvalidRequest("the schema has too many cases", "make it simpler")
        if _HAS_WORK.isdisjoint(schema):
            return _arranged(schema)
        told = dict(schema)
        if not _HAS_REWRITE.isdisjoint(told):
            for key, rewrite in _REWRITES.items():
                if key in told:
                    self._try(key, rewrite, told)
        if _is_chosen(told):
            del told["anyOf"]
        if not _HAS_INSIDE.isdisjoint(told):
            for key in _INSIDE:
                if key in told:
                    told[key] = self._inside(key, told[key])
        pattern = told.get("pattern")
        if isinstance(pattern, str) and len(pattern) > _LONG and told.keys() <= {"type", "pattern"}:
            self._long.setdefault(f"{told.get('type')} {pattern}", []).append(told)
        return _arranged(told)

    def _inside(self, key: str, said: Any) -> Any:
        """The value of a keyword, with the schemas in it rewritten."""
        if isinstance(said, list):
            return [self.of(one) for one in said] if key in _LISTS else said
        if isinstance(said, dict) and key in _MAPS:
            return {name: self.of(one) for name, one in said.items()}
        return self.of(said) if key in _ONE else said

    def _try(self, key: str, rewrite: Callable[[dict[str, Any], Scope], None], told: dict[str, Any]) -> None:
        before = dict(told)
        try:
            rewrite(told, self._scope)
        except Unknown as error:
            if not self._lenient and key != "oneOf":  # llguidance handles some oneOf that are not handled here
                message = f"{key}: it cannot be enforced here ({error})"
                raise InvalidRequest(message, "rewrite it, or leave it out") from error
            told.clear()
            told.update({k: v for k, v in before.items() if k != key or key == "oneOf"})  # oneOf is then read as anyOf
        except (TypeError, AttributeError, ValueError, KeyError):  # malformed: llguidance will refuse it
            told.clear()
            told.update(before)


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


def _is_chosen(told: dict[str, Any]) -> bool:
    """Whether one of the choices must hold anyway; llguidance would combine each choice with it."""
    every, options = told.get("allOf"), told.get("anyOf")
    if not isinstance(every, list) or not isinstance(options, list):
        return False
    return any(same(one, option) for one in every for option in options)


def _is_done(said: Said) -> bool:
    """Whether there is nothing to rewrite."""
    return all(_HAS_REWRITE.isdisjoint(shape) and _is_arranged(shape) for shape in said.shapes)


# -- rewrites: each removes its keyword ------------------------------------------------------------------------------


def _not(told: dict[str, Any], scope: Scope) -> None:
    also(told, negated(told.pop("not"), scope))


def _one_of(told: dict[str, Any], scope: Scope) -> None:
    options = told["oneOf"]
    if len(options) > MAX_CASES:
        raise Unknown("too many choices")
    alone = [_alone(one, [o for j, o in enumerate(options) if j != i], scope) for i, one in enumerate(options)]
    place = {key: ("anyOf" if key == "oneOf" else key) for key in told}
    if "anyOf" in told:
        del told["oneOf"]
        also(told, {"anyOf": alone})
        return
    found = {place[key]: (alone if key == "oneOf" else value) for key, value in told.items()}
    told.clear()
    told.update(found)


def _alone(one: Any, others: list[Any], scope: Scope) -> Any:
    """A schema without the values of the others."""
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


def _dependencies(told: dict[str, Any], scope: Scope) -> None:
    for name in ("dependencies", "dependentRequired", "dependentSchemas"):
        for key, needed in told.pop(name, {}).items():
            then: list[Any] = (
                [{"required": [key, *needed]}] if isinstance(needed, list) else [{"required": [key]}, needed]
            )
            if isinstance(needed, str):
                then = [{"required": [key, needed]}]
            if needed != [] and needed is not True:
                also(told, {"anyOf": [{"properties": {key: False}}, {"allOf": then}]})


def _format(told: dict[str, Any], scope: Scope) -> None:
    said = told["format"]
    pattern = FORMATS.get(said, "")
    if pattern is None:
        raise Unknown(f"no pattern is known for the format {said}")
    if pattern and "pattern" in told:
        also(told, {"pattern": pattern})
    elif pattern:
        told["pattern"] = pattern
    if pattern:
        del told["format"]


def _pattern(told: dict[str, Any], scope: Scope) -> None:
    told["pattern"] = as_ecma(told["pattern"])


def _patterns(told: dict[str, Any], scope: Scope) -> None:
    told["patternProperties"] = {as_ecma(pattern): one for pattern, one in told["patternProperties"].items()}


_REWRITES: dict[str, Callable[[dict[str, Any], Scope], None]] = {
    "format": _format,
    "not": _not,
    "oneOf": _one_of,
    "allOf": conditions.all_of,
    "if": conditions.when,
    "then": lambda told, _: told.pop("then"),
    "else": lambda told, _: told.pop("else"),
    "dependencies": _dependencies,
    "dependentRequired": _dependencies,
    "dependentSchemas": _dependencies,
    "propertyNames": counts.property_names,
    "contains": counts.contains,
    "minContains": lambda told, _: told.pop("minContains"),
    "maxContains": lambda told, _: told.pop("maxContains"),
    "uniqueItems": counts.unique_items,
    "minProperties": counts.properties,
    "maxProperties": counts.properties,
    "pattern": _pattern,
    "patternProperties": _patterns,
}
_HAS_REWRITE = frozenset(_REWRITES)
_HAS_WORK = _HAS_REWRITE | _HAS_INSIDE
