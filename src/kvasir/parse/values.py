"""Values in plain text between marks, converted to JSON according to the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kvasir.parse import python_text
from kvasir.parse.tape import Tape

Schema = Mapping[str, Any]

STRING = frozenset(("string",))
JSON = frozenset(("json",))  # any type, in JSON notation
_LITERALS = {"True": "true", "False": "false", "None": "null"}  # as templates print them in Python
_MAX_DEPTH = 8  # of references and alternatives to follow


def types_of(parameters: Schema | None, name: str) -> frozenset[str]:
    """The JSON types that a parameter may have; empty if the schema gives none."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return frozenset(_types(schema, parameters or {}, _MAX_DEPTH)) if isinstance(schema, Mapping) else frozenset()


def _types(schema: Schema, root: Schema, depth: int) -> set[str]:
    if depth == 0:
        return set()
    found = schema.get("type")
    if isinstance(found, str):
        types = {found}
    elif isinstance(found, list):
        types = {name for name in found if isinstance(name, str)}
    elif isinstance(reference := schema.get("$ref"), str):
        target = resolve(reference, root)
        types = _types(target, root, depth - 1) if target is not None else set()
    elif isinstance(options := schema.get("anyOf") or schema.get("oneOf"), list):
        each = [_types(option, root, depth - 1) for option in options if isinstance(option, Mapping)]
        types = set().union(*each) if all(each) else set()  # one alternative may be anything
    elif isinstance(values := schema.get("enum"), list):
        types = {_type(value) for value in values}
    else:
        types = {_type(schema["const"])} if "const" in schema else set()
    return types | {"null"} if types and schema.get("nullable") is True else types


def resolve(reference: str, root: Schema) -> Schema | None:
    """The target of a reference within the same schema: "#/$defs/Name"; None if there is none."""
    if not reference.startswith("#/"):
        return None
    target: Any = root
    for part in reference[2:].split("/"):
        target = target.get(part) if isinstance(target, Mapping) else None
    return target if isinstance(target, Mapping) else None


def _type(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number" if isinstance(value, float) else "integer"
    kinds = {str: "string", list: "array", dict: "object", type(None): "null"}
    return kinds.get(type(value), "")


def to_json(text: str, types: frozenset[str]) -> str:
    """A parameter's text as JSON: the value that it parses as, if that is of one of the `types`, else a string.

    Without types, text that parses as something other than a string becomes that value. Lists and objects may also be
    in Python notation.
    """
    stripped = text.strip()
    literal = _LITERALS.get(stripped, stripped)
    kind = _json_type(literal)
    if not kind and stripped[:1] in ("[", "{") and (python := _from_python(stripped)) is not None:
        literal, kind = python, _json_type(python)
    if kind and types == JSON:
        return literal
    fits = kind in types or (kind == "integer" and "number" in types) if types else kind != "string"
    if kind and fits and not (kind == "string" and "string" in types):
        return literal
    return json.dumps(text, ensure_ascii=False)


def from_tags(text: str, lead: str, depth: int = _MAX_DEPTH) -> str | None:
    """A list or an object in tags as JSON (<item> for the items of a list); None for any other text. lead: the text
    before each tag."""
    members: list[tuple[str, str]] = []
    while text := text.lstrip() if members else text.strip():
        head = re.match(rf"{re.escape(lead)}<([^<>/]+)>", text)
        end = text.find(f"{lead}</{head[1]}>", head.end()) if head and depth else -1
        if head is None or end < 0:
            return None
        inner = text[head.end() : end]
        members.append((head[1], from_tags(inner, lead, depth - 1) or to_json(inner, frozenset())))
        text = text[end + len(lead) + len(head[1]) + 3 :]
    if not members:
        return None
    if {name for name, _ in members} == {"item"}:
        return f"[{', '.join(value for _, value in members)}]"
    return "{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in members) + "}"


def _from_python(text: str) -> str | None:
    """A Python literal as JSON; None if the text is not a literal."""
    tape, pieces = Tape(), list[str]()
    tape.push(text)
    tape.ended = True
    routine = python_text.value(tape, pieces.append)
    try:
        next(routine)
    except StopIteration as found:
        return "".join(pieces) if found.value and tape.at_end else None
    raise AssertionError("the text has ended: no value is pending")


def _json_type(text: str) -> str:
    """The JSON type of a text; "" if it is not JSON."""
    try:
        # Numbers stay text: the value is emitted as written.
        value = json.loads(text, parse_int=_Integer, parse_float=_Number, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return ""
    if isinstance(value, (_Integer, _Number)):
        return "integer" if isinstance(value, _Integer) else "number"
    return _type(value)


class _Integer(str):
    pass


class _Number(str):
    pass


def _refuse(constant: str) -> object:
    raise ValueError(constant)  # NaN and the infinities are not JSON
