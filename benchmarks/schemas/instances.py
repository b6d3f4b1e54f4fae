"""Instances drawn from a schema, and changed copies of them. Either may be valid or not: a validator must decide."""

from __future__ import annotations

import copy
import re._constants as codes
import re._parser as parser
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

DRAWN, CHANGED = 16, 3
_FORMATS = {
    "date-time": "2024-02-29T12:30:00Z", "date": "2024-02-29", "time": "12:30:00Z", "email": "a@example.com",
    "uri": "https://example.com/a?b#c", "uri-reference": "/a/b", "hostname": "example.com", "ipv4": "127.0.0.1",
    "ipv6": "::1", "uuid": "2eb8aa08-aa98-11ea-b4aa-73b441d16380", "regex": "^a+$", "json-pointer": "/a/0",
    "uri-template": "/a/{b}", "duration": "P1D", "iri": "https://example.com/", "idn-email": "a@example.com",
}  # fmt: skip
_TEXTS = ("", "a", "value", "B2", "some text", "1.2.3", "x-y")
_SOME = (None, True, 0, 3, 1.5, "a", "value", [], ["a"], {}, {"a": 1})


def candidates(schema: Any, rng: Random) -> Iterator[Any]:
    for _ in range(DRAWN):
        try:
            drawn = _Draw(schema, rng).value(schema, 0)
        except Exception:  # a schema of an unsupported shape
            continue
        yield drawn
        for _ in range(CHANGED):
            yield changed(drawn, rng)
    yield from copy.deepcopy(_SOME)


def changed(value: Any, rng: Random) -> Any:
    """The value with one change at a random place."""
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        match rng.randrange(6):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, rng.choice(("zz", "x-other", "a")): rng.choice(_SOME)}
            case _:
                return {k: changed(v, rng) if k == key else v for k, v in value.items()}
    if isinstance(value, list) and value:
        i = rng.randrange(len(value))
        match rng.randrange(4):
            case 0:
                return value[:i] + value[i + 1 :]
            case 1:
                return [*value, value[i]]
            case _:
                return [*value[:i], changed(value[i], rng), *value[i + 1 :]]
    if isinstance(value, str) and rng.random() < 0.5:
        return value + rng.choice(("x", "-", "!", " "))
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.5:
        return rng.choice((-value - 1, value + 1, value * 1000 + 7, value + 0.5))
    return rng.choice(_SOME)


class _Draw:
    def __init__(self, root: Any, rng: Random):
        self.root, self.rng = root, rng

    def value(self, schema: Any, depth: int) -> Any:
        rng = self.rng
        if not isinstance(schema, Mapping):
            return rng.choice(_SOME)
        if depth > 40:
            raise RecursionError
        schema = self.merged(schema, depth)
        if "const" in schema:
            return schema["const"]
        if isinstance(schema.get("enum"), list):
            return rng.choice(schema["enum"])
        for source in ("default", "examples"):
            if source in schema and rng.random() < 0.3:
                return schema[source] if source == "default" else rng.choice(schema[source])
        kind = schema.get("type") or self.kind(schema)
        return self.typed(rng.choice(kind) if isinstance(kind, list) else kind, schema, depth)

    def merged(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        """The schema merged with its references, and with one alternative of each of its choices."""
        schema = dict(schema)
        more: list[Any] = []
        if isinstance(schema.get("$ref"), str):
            more.append(self.resolve(schema.pop("$ref")))
        more += schema.pop("allOf", None) or []
        for key in ("anyOf", "oneOf"):
            if schema.get(key):
                more.append(self.rng.choice(schema.pop(key)))
        if "if" in schema:
            condition, then, other = (schema.pop(key, True) for key in ("if", "then", "else"))
            more += [condition, then] if self.rng.random() < 0.6 else [other]
        for one in more:
            if isinstance(one, Mapping) and depth < 30:
                one = self.merged(one, depth + 1)
                properties = {**schema.get("properties", {}), **one.get("properties", {})}
                required = [*schema.get("required", ()), *one.get("required", ())]
                schema |= (
                    one
                    | ({"properties": properties} if properties else {})
                    | ({"required": required} if required else {})
                )
        return schema

    def resolve(self, reference: str) -> Any:
        if not reference.startswith("#"):
            raise KeyError(reference)
        found = self.root
        for part in filter(None, reference[1:].split("/")):
            part = part.replace("~1", "/").replace("~0", "~")
            found = found[int(part)] if isinstance(found, list) else found[part]
        return found

    def kind(self, schema: Mapping[str, Any]) -> Any:
        for keys, kind in (
            (("properties", "required", "additionalProperties", "patternProperties", "minProperties"), "object"),
            (("items", "prefixItems", "minItems", "contains", "uniqueItems"), "array"),
            (("pattern", "minLength", "maxLength", "format"), "string"),
            (("minimum", "maximum", "multipleOf"), "number"),
        ):
            if any(key in schema for key in keys):
                return kind
        return ["string", "integer", "boolean", "object"]

    def typed(self, kind: str, schema: Mapping[str, Any], depth: int) -> Any:
        rng = self.rng
        match kind:
            case "null":
                return None
            case "boolean":
                return rng.random() < 0.5
            case "integer" | "number":
                low = schema.get("minimum", schema.get("exclusiveMinimum", schema.get("maximum", 9) - 9))
                high = schema.get("maximum", low + 9)
                number = rng.choice((low, high, rng.randint(int(low), max(int(low), int(high)))))
                step = schema.get("multipleOf")
                return step * round(number / step) if step else number
            case "string":
                return self.text(schema)
            case "array":
                return self.array(schema, depth)
        return self.object(schema, depth)

    def text(self, schema: Mapping[str, Any]) -> str:
        rng = self.rng
        if isinstance(schema.get("pattern"), str):
            return matching(schema["pattern"], rng)
        if schema.get("format") in _FORMATS and rng.random() < 0.8:
            return _FORMATS[schema["format"]]
        text = rng.choice(_TEXTS)
        return text.ljust(schema.get("minLength", 0), "a")[: schema.get("maxLength", 99)]

    def array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        prefix, items = schema.get("prefixItems", []), schema.get("items", {})
        if isinstance(items, list):
            prefix, items = items, schema.get("additionalItems", {})
        least = schema.get("minItems", 0)
        count = max(least, self.rng.choice((0, 1, 2)) if depth < 8 else 0)
        count = min(count, schema.get("maxItems", count))
        drawn = [self.value(one, depth + 1) for one in prefix[:count]]
        if items is not False:
            drawn += [self.value(items, depth + 1) for _ in range(count - len(drawn))]
        if "contains" in schema:
            drawn.insert(0, self.value(schema["contains"], depth + 1))
        return drawn

    def object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        rng, properties, required = self.rng, schema.get("properties", {}), schema.get("required", [])
        some = 0.5 if depth < 3 else 0.1 if depth < 6 else 0.0
        some = min(some, 6 / len(properties)) if properties else some
        drawn = {
            k: self.value(v, depth + 1)
            for k, v in properties.items()
            if v is not False and (k in required or rng.random() < some)
        }
        free = schema.get("additionalProperties", {})
        for key in required:
            if key not in drawn:
                drawn[key] = self.value(free, depth + 1)
        patterns = schema.get("patternProperties", {})
        if patterns and rng.random() < 0.6:
            pattern = rng.choice(list(patterns))
            drawn[matching(pattern, rng)] = self.value(patterns[pattern], depth + 1)
        if free is not False and ((isinstance(free, Mapping) and free) or rng.random() < 0.15):
            drawn[rng.choice(("a", "some-key", "other"))] = self.value(free, depth + 1)
        return drawn


def matching(pattern: str, rng: Random) -> str:
    """A text that matches the pattern; unsupported constructs are approximated."""
    return _text(parser.parse(pattern), rng)


def _text(tree: Any, rng: Random) -> str:
    return "".join(_piece(code, argument, rng) for code, argument in tree)


def _piece(code: Any, argument: Any, rng: Random) -> str:
    match code:
        case codes.LITERAL:
            return chr(argument)
        case codes.NOT_LITERAL:
            return "a" if argument != ord("a") else "b"
        case codes.ANY:
            return rng.choice("ab1")
        case codes.IN:
            return _one_of(argument, rng)
        case codes.MAX_REPEAT | codes.MIN_REPEAT | codes.POSSESSIVE_REPEAT:
            low, high, inner = argument
            count = rng.randint(low, min(high, low + 2))
            return "".join(_text(inner, rng) for _ in range(count))
        case codes.SUBPATTERN:
            return _text(argument[3], rng)
        case codes.BRANCH:
            return _text(rng.choice(argument[1]), rng)
        case codes.ASSERT | codes.ASSERT_NOT | codes.AT:
            return ""
    raise ValueError(code)


_CLASSES = {codes.CATEGORY_DIGIT: "0123456789", codes.CATEGORY_WORD: "abXY01_", codes.CATEGORY_SPACE: " "}
_NEGATED = {codes.CATEGORY_NOT_DIGIT: "ab-", codes.CATEGORY_NOT_WORD: "-. ", codes.CATEGORY_NOT_SPACE: "ab1"}


def _one_of(argument: Any, rng: Random) -> str:
    if argument[0][0] is codes.NEGATE:
        taken = {chr(c) for code, c in argument[1:] if code is codes.LITERAL}
        return next(c for c in "ab1-_.x Z" if c not in taken)
    code, found = rng.choice(argument)
    if code is codes.LITERAL:
        return chr(found)
    if code is codes.RANGE:
        return chr(rng.randint(*found))
    return rng.choice((_CLASSES | _NEGATED)[found])
