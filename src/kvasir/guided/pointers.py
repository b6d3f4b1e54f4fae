"""A schema and its draft: resolves its references, and translates it to the latest draft."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import count
from typing import Any

from kvasir.errors import InvalidRequest
from kvasir.guided.summary import Summary
from kvasir.guided.texts import Unknown

_NAMED = re.compile(r"#(/(\$defs|definitions)/[^/]+)?")
_DRAFT = re.compile(r"https?://json-schema\.org/(?:draft-0([3-7])|draft/(2019-09|2020-12))/schema#?")
_DATA = frozenset(("const", "enum", "default", "examples"))
_FLAT = _DATA | {"type", "required"}  # keywords without schemas in their values
_NESTED = (dict, list)
_OWN = frozenset(("$id", "id", "$schema"))  # of a part with an identity or a draft of its own
_BESIDE_REFERENCES = ("$schema", "$id", "id", "$defs", "definitions")  # all other keywords next to $ref are ignored
_SINCE = {  # keywords by the draft that introduced them; earlier drafts ignore them
    6: ("const", "contains", "propertyNames"),
    7: ("if", "then", "else"),
    8: ("dependentRequired", "dependentSchemas", "minContains", "maxContains", "unevaluatedItems",
        "unevaluatedProperties", "$recursiveRef", "$recursiveAnchor"),
    9: ("prefixItems", "$dynamicRef", "$dynamicAnchor"),
}  # fmt: skip
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"))
_OTHERWISE = frozenset((  # keywords with a different meaning in older drafts
    *("$ref", "$id", "id", "items", "additionalItems", "exclusiveMinimum", "exclusiveMaximum"),
))  # fmt: skip
_PLAIN = frozenset((  # keywords with one meaning in all drafts, after `prepared`
    *("type", "const", "enum", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$defs", "definitions"),
    *("properties", "patternProperties", "additionalProperties", "propertyNames", "required", "minProperties"),
    *("maxProperties", "items", "prefixItems", "contains", "minContains", "maxContains", "minItems", "maxItems"),
    *("uniqueItems", "minLength", "maxLength", "pattern", "format", "multipleOf", "minimum", "maximum"),
    *("exclusiveMinimum", "exclusiveMaximum"),
))  # fmt: skip
_MOST_VISITS = 20_000


class Pointers:
    """The references of one schema. schema: the schema in the latest draft, with references only to the root or its
    definitions. mixed: parts of it have drafts of their own, and `schema` is unchanged. plain: apart from its root,
    `schema` is unchanged, since it already conforms to the latest draft."""

    def __init__(self, schema: Mapping[str, Any], summary: Summary | None = None):
        """summary: the contents of its schemas, if known."""
        self._root = schema
        self._visits = 0
        self.seen: dict[int, tuple[Any, Any]] = {}
        self._moved: dict[str, str] = {}
        self._named = schema.get("$defs", {})
        if not isinstance(self._named, Mapping):
            raise InvalidRequest("'$defs' is not an object", "map names to schemas")
        self._draft = _draft_of(schema)
        self._otherwise = _OTHERWISE if self._draft < 8 else _OTHERWISE - {"$ref"}
        self._newer = frozenset(key for since, keys in _SINCE.items() if since > self._draft for key in keys)
        own = frozenset[str]() if summary and summary.keywords() <= _PLAIN else _within(schema)
        self._based = not own.isdisjoint(("$id", "id"))
        others = "$schema" in own or ("$schema" in schema and not _DRAFT.fullmatch(str(schema["$schema"])))
        self.mixed = others or (self._based and self._draft < 9)
        self.plain = summary is not None and not own and not self.mixed and self._is_plain(summary)
        self.schema: Any = schema if self.mixed else self._normalized(schema)

    @property
    def rooted(self) -> bool:
        """Whether `#/` means the root everywhere."""
        return not self._based

    def unused(self, stem: str, taken: Mapping[str, Any] = {}) -> str:
        """An unused name for another definition."""
        return next(name for n in count() if (name := f"{stem}-{n}") not in {*taken, *self.schema.get("$defs", ())})

    def find(self, reference: Any) -> Any:
        if self._based or not isinstance(reference, str) or not reference.startswith("#"):
            raise Unknown("a reference out of the schema")
        return target_of(self.schema, reference)

    def spend(self) -> None:
        self._visits += 1
        if self._visits > _MOST_VISITS:
            raise Unknown("too many cases")

    def _is_plain(self, summary: Summary) -> bool:
        keywords = summary.keywords()
        if summary.old or not keywords <= _PLAIN | _OWN or not keywords.isdisjoint(self._newer):
            return False
        if self._draft < 8 and not summary.alone("$ref", _BESIDE_REFERENCES):
            return False
        return all(_NAMED.fullmatch(one) or not one.startswith("#/") for one in summary.references)

    def _normalized(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        root = {key: value for key, value in schema.items() if key != "$schema"}
        if self.plain:
            return self._latest(root)
        node = self._rewritten(root)
        moved: dict[str, Any] = {}
        while rest := [(pointer, name) for pointer, name in self._moved.items() if name not in moved]:
            moved |= {name: self._rewritten(target_of(self._root, pointer)) for pointer, name in rest}
        return {**node, "$defs": {**node.get("$defs", {}), **moved}} if moved else node

    def _rewritten(self, schema: Any, names: bool = False) -> Any:
        """names: the keys of the schema are names and not keywords."""
        if isinstance(schema, list):
            return [self._rewritten(one) if isinstance(one, _NESTED) else one for one in schema]
        if not isinstance(schema, dict):
            return schema
        if names:
            return {name: self._rewritten(one) for name, one in schema.items()}
        same = self._newer.isdisjoint(schema) and self._otherwise.isdisjoint(schema)
        node = schema if same or (len(schema) == 1 and "$ref" in schema) else self._latest(schema)
        found = {
            key: self._rewritten(constraint, key in _MAPS)
            for key, constraint in node.items()
            if isinstance(constraint, _NESTED) and key not in _FLAT
        }
        if isinstance(reference := node.get("$ref"), str):
            found["$ref"] = self._name(reference)
        return {**node, **found} if found else node

    def _latest(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        node = {key: value for key, value in schema.items() if key not in self._newer}
        if self._draft < 8 and isinstance(node.get("$ref"), str):
            node = {key: value for key, value in node.items() if key in ("$ref", *_BESIDE_REFERENCES)}
        for key in ("$id", "id"):
            if isinstance(node.get(key), str) and node[key].startswith("#"):
                anchor = node.pop(key)[1:]
                if anchor and "/" not in anchor:
                    node["$anchor"] = anchor
        if self._draft < 6 and isinstance(node.get("id"), str):
            node["$id"] = node.pop("id")
        if isinstance(node.get("items"), list) and "prefixItems" not in node:
            node["prefixItems"] = node.pop("items")
            if "additionalItems" in node:
                node["items"] = node["additionalItems"]
        node.pop("additionalItems", None)
        for bound, other in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if isinstance(node.get(other), bool) and node.pop(other) and bound in node:
                node[other] = node.pop(bound)
        return node

    def _name(self, reference: str) -> str:
        if self._based or not reference.startswith("#/") or _NAMED.fullmatch(reference):
            return reference
        try:
            target_of(self._root, reference)
        except Unknown:
            return reference
        if reference not in self._moved:
            taken = {*self._named, *self._moved.values()}
            self._moved[reference] = next(name for n in count() if (name := f"moved-{n}") not in taken)
        return f"#/$defs/{self._moved[reference]}"


def _draft_of(schema: Mapping[str, Any]) -> int:
    """The draft of a schema: 3 to 7; 8 for 2019-09; 9 for 2020-12, and if it names none."""
    found = _DRAFT.fullmatch(str(schema.get("$schema", "")))
    return 9 if not found else int(found[1]) if found[1] else 8 if found[2] == "2019-09" else 9


def target_of(found: Any, reference: str) -> Any:
    """The part of `found` that a JSON pointer names. Raises Unknown."""
    if reference[1:2] not in ("", "/"):
        raise Unknown("an anchor")
    for part in reference[1:].split("/")[1:]:
        part = re.sub("%([0-9a-fA-F]{2})", lambda m: chr(int(m[1], 16)), part).replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(part)] if isinstance(found, list) else found[part]
        except (KeyError, IndexError, ValueError, TypeError):
            raise Unknown("a reference without a target") from None
    return found


def _within(schema: Mapping[str, Any]) -> frozenset[str]:
    """The keywords of _OWN in schemas inside this schema; "#" for an anchor."""
    found: set[str] = set()
    rest: list[Any] = [value for key, value in schema.items() if key not in _DATA]
    while rest:
        one = rest.pop()
        if isinstance(one, list):
            rest += one
        elif isinstance(one, dict):
            if not _OWN.isdisjoint(one):
                names = ((key, name) for key in _OWN if isinstance(name := one.get(key), str))
                found |= {"#" if name.startswith("#") else key for key, name in names}
            rest += [value for key, value in one.items() if isinstance(value, _NESTED) and key not in _FLAT]
    return frozenset(found)
