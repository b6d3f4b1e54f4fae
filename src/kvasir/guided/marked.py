"""A tool's arguments in the notation of Gemma 4 (parse/marked_text), by its schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.errors import InvalidRequest
from kvasir.guided.lark import Lark
from kvasir.parse.marked_text import PLAIN_KEY, QUOTE
from kvasir.parse.values import resolve

_INTEGER = "/-?(0|[1-9][0-9]{0,17})/"
_NUMBER = r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/"
_ENFORCED = frozenset(("type", "enum", "const", "properties", "required", "items", "anyOf", "oneOf", "$ref"))
_NO_CONSTRAINT = frozenset((
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "$defs", "definitions", "additionalProperties", "nullable"),
))  # fmt: skip
_WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf")  # each defines a value completely
_ANY = ("string", "number", "boolean", "null", "array", "object")


class MarkedValues:
    """Adds rules to `lark` whose names begin with `name`. Objects have only the properties that the schema names."""

    def __init__(self, lark: Lark, name: str, root: Mapping[str, Any], lenient: bool, quote: str = QUOTE):
        """root: the whole schema. lenient: keywords that cannot be enforced are ignored instead of refused. quote: the
        mark around strings."""
        self._lark, self._name, self._root, self._lenient = lark, name, root, lenient
        self._references: dict[str, str] = {}
        self._count = 0
        self._quote = quote
        self._any: dict[str, str] = {}

    def value(self, schema: Any) -> str:
        """A Lark expression for the values of a schema. Raises InvalidRequest if it cannot be enforced."""
        if not isinstance(schema, Mapping):
            schema = {}
        unknown = sorted(set(schema) - _ENFORCED - _NO_CONSTRAINT)
        if unknown and not self._lenient:
            message = f"{unknown[0][:80]!r} cannot be enforced in this model's tool-call format"
            raise InvalidRequest(message, "leave it out, or leave strict out", param="tools")
        options = self._options(schema)
        return self._either([*options, '"null"'] if schema.get("nullable") is True else options)

    def _options(self, schema: Mapping[str, Any]) -> list[str]:
        whole = next((key for key in _WHOLE if key in schema), None)
        if whole is None:
            return [self._of(kind, schema) for kind in _kinds(schema)]
        beside = sorted(set(schema) & _ENFORCED - {whole} - ({"type"} if whole in ("enum", "const") else set()))
        if beside and not self._lenient:
            message = f"{beside[0]!r} beside {whole!r} cannot be enforced in this model's tool-call format"
            raise InvalidRequest(message, "leave one of them out, or leave strict out", param="tools")
        constraint = schema[whole]
        if whole == "$ref" and isinstance(constraint, str):
            return [self._reference(constraint)]
        choices = [constraint] if whole == "const" else constraint
        if not isinstance(choices, list) or not choices:
            raise InvalidRequest(f"{whole!r} is not a list of choices", "give one", param="tools")
        if whole in ("enum", "const"):
            return [self._lark.words(self._written(choice)) for choice in choices]
        return [self.value(choice) for choice in choices]

    def _of(self, kind: Any, schema: Mapping[str, Any]) -> str:
        match kind:
            case "string":
                return self._string()
            case "integer":
                return _INTEGER
            case "number":
                return _NUMBER
            case "boolean":
                return '("true" | "false")'
            case "null":
                return '"null"'
            case "array":
                item = self.value(schema["items"]) if "items" in schema else self._anything()
                return f'"[" ({item} ("," {item})*)? "]"'
            case "object" if (
                "properties" in schema or "required" in schema or schema.get("additionalProperties") is False
            ):
                return self._object(schema)
            case "object":
                key = rf"/{PLAIN_KEY.pattern}/"
                pair = f'{key} ":" {self._anything()}'
                return f'"{{" ({pair} ("," {pair})*)? "}}"'
        raise InvalidRequest(f"the type {str(kind)[:80]!r} is not a type of JSON Schema", param="tools")

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties, needed = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping):
            raise InvalidRequest("'properties' is not an object", "map names to schemas", param="tools")
        if not isinstance(needed, list) or not all(isinstance(name, str) for name in needed):
            raise InvalidRequest("'required' is not a list of names", "give one", param="tools")
        keys = sorted(properties, key=str.lower)  # the order of the template
        pairs = {key: f"{self._lark.words(self._key(key) + ':')} {self.value(properties[key])}" for key in keys}
        return f'"{{" {self._lark.listed(self._new(), pairs, needed, ",")} "}}"'

    def _string(self) -> str:
        if "string" not in self._any:
            self._any["string"] = self._new()
            self._lark.until(f"{self._any['string']}_text", self._quote)
            self._lark.rule(self._any["string"], f"{self._lark.words(self._quote)} {self._any['string']}_text")
        return self._any["string"]

    def _anything(self) -> str:
        if "any" not in self._any:
            name = self._any["any"] = self._new()
            self._lark.rule(name, self.value({}))
        return self._any["any"]

    def _reference(self, reference: str) -> str:
        if reference not in self._references:
            target = resolve(reference, self._root)
            if target is None:
                raise InvalidRequest(f"{reference[:80]!r} is not in the schema", param="tools")
            name = self._references[reference] = self._new()
            self._lark.rule(name, self.value(target))
        return self._references[reference]

    def _new(self) -> str:
        self._count += 1
        return f"{self._name}_{self._count}"

    @staticmethod
    def _either(options: list[str]) -> str:
        return options[0] if len(options) == 1 else f"({' | '.join(options)})"

    def _key(self, key: str) -> str:
        return key if PLAIN_KEY.fullmatch(key) else self._quote + key + self._quote

    def _written(self, value: Any) -> str:
        if isinstance(value, str):
            return self._quote + value + self._quote
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{self._key(key)}:{self._written(one)}" for key, one in value.items()) + "}"
        if isinstance(value, list):
            return f"[{','.join(map(self._written, value))}]"
        return json.dumps(value)


def _kinds(schema: Mapping[str, Any]) -> Sequence[Any]:
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return [kinds]
    if isinstance(kinds, Sequence):
        return kinds
    if "properties" in schema:
        return ["object"]
    return ["array"] if "items" in schema else _ANY
