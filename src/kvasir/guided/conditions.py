"""Rewrites conditions: `if`, and several of them in `allOf` (see cases)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any, NamedTuple

from kvasir.guided.apart import apart
from kvasir.guided.logic import KINDS, MAX_CASES, NOTES, Scope, also, negated, same, types_of
from kvasir.guided.texts import Unknown

_MOST = 4 * MAX_CASES  # conditions that become the cases of one choice


class _Asked(NamedTuple):
    """A condition on one key: its values, and whether the key must be present."""

    key: str
    required: bool
    values: list[Any]


def when(node: dict[str, Any], scope: Scope) -> None:
    """Rewrites `if`, `then` and `else` to alternatives. Raises Unknown."""
    condition, then, other = node.pop("if"), node.pop("then", True), node.pop("else", True)
    if then is not True or other is not True:
        also(node, _either(condition, then, other, scope))


def _either(condition: Any, then: Any, other: Any, scope: Scope) -> Any:
    no = negated(condition, scope)
    yes = [{"allOf": [condition, then]}] if then is not False else []
    return {"anyOf": [*yes, {"allOf": [no, other]} if other is not True else no]}


def all_of(node: dict[str, Any], scope: Scope) -> None:
    """Turns conditions of which at most one holds, or that test the value of one key, into the cases of one choice:
    llguidance would expand all their combinations."""
    plain = [one for one in node["allOf"] if not _is_condition(one)]
    chain = [one for one in node["allOf"] if _is_condition(one)]
    if 2 <= len(chain) <= _MOST and (cases := _by_value(chain, node, scope) or _by_turns(chain, scope)):
        node["allOf"] = [*plain, {"anyOf": cases}]


def _by_value(chain: list[Any], node: Mapping[str, Any], scope: Scope) -> list[Any] | None:
    """The cases of conditions that all test one key, each for different values; None if they do not. If the key is
    absent, the conditions that do not require it hold; for a value that is not an object, all hold."""
    asked = [one for one in (_by_key(one["if"]) for one in chain) if one]
    key = asked[0].key if asked else ""
    values = [value for one in asked for value in one.values]
    if len(asked) < len(chain) or any(one.key != key for one in asked):
        return None
    if any(same(a, b) for a, b in combinations(values, 2)):
        return None
    try:
        other = negated({"enum": values}, scope)
    except Unknown:
        return None
    there = {"type": "object", "required": [key]}
    cases = [{"allOf": [there, one["if"], one["then"]]} for one in chain]
    rest = [there | {"properties": {key: other}}] if other is not False else []
    thens = [one["then"] for one in chain]
    if not any(one.required for one in asked):
        return [*cases, {"allOf": [{"properties": {key: False}}, *thens]}, *rest]
    absent = [then for then, one in zip(thens, asked, strict=True) if not one.required]
    others = [{"allOf": [{"type": types_of(KINDS - {"object"})}, *thens]}] if node.get("type") != "object" else []
    return [*cases, {"allOf": [{"type": "object", "properties": {key: False}}, *absent]}, *others, *rest]


def _by_turns(chain: list[Any], scope: Scope) -> list[Any] | None:
    """The cases of conditions that exclude each other, with their consequences; None if they do not."""
    cases = [{"allOf": [one["if"], one["then"]]} for one in chain]
    conditions = [one["if"] for one in chain]
    if not all(apart(a, b, scope) for i, a in enumerate(cases) for j, b in enumerate(conditions) if i != j):
        return None
    return [*cases, _none_of(conditions, scope)]


def _is_condition(schema: Any) -> bool:
    return isinstance(schema, dict) and set(schema) - NOTES == {"if", "then"}


def _none_of(conditions: list[Any], scope: Scope) -> Any:
    """A schema for which no condition holds; short if each condition only lists values of one key."""
    asked = [one for one in map(_by_key, conditions) if one]
    if len(asked) == len(conditions) and len({(one.key, one.required) for one in asked}) == 1:
        key, values = asked[0].key, [value for one in asked for value in one.values]
        at_all = {"required": [key]} if asked[0].required else {}
        return negated({"properties": {key: {"enum": values}}, **at_all}, scope)
    return {"allOf": [negated(condition, scope) for condition in conditions]}


def _by_key(condition: Any) -> _Asked | None:
    if not isinstance(condition, dict) or set(condition) - NOTES - {"properties", "required"}:
        return None
    properties, required = condition.get("properties", {}), condition.get("required", [])
    if len(properties) != 1 or required not in ([], list(properties)):
        return None
    (key, schema), *_ = properties.items()
    if not isinstance(schema, dict):
        return None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return _Asked(key, bool(required), values) if values is not None and len(set(schema) - NOTES) == 1 else None
