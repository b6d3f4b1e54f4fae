"""Arguments with bare keys and strings between marks: what is drawn by a schema is read as JSON of it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.errors import InvalidRequest
from kvasir.guided.tools import Function, tool_grammar
from kvasir.parse.events import ParsedMessage
from kvasir.parse.format import Format
from kvasir.parse.parser import Parser
from kvasir.parse.table import choose
from tests.examples import examples
from tests.guided.walk import SPECIALS, TOKENIZER, ids_of, make_guides, walk

GUIDES = make_guides()
FORMAT = Format(choose(tools="gemma4").calls)
TREE = {
    "type": "object",
    "properties": {
        "size": {"type": ["integer", "null"]},
        "kind": {"enum": ["leaf", "a b", 3]},
        "odd key": {"type": "boolean"},
        "below": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
        "note": {"anyOf": [{"type": "string"}, {"type": "number"}]},
    },
    "required": ["size", "kind", "odd key"],
}
SCHEMA = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/tree"}},
    "required": ["root"],
    "$defs": {"tree": TREE},
}


def is_tree(value: object) -> bool:
    assert isinstance(value, dict) and set(value) <= set(TREE["properties"]) and set(TREE["required"]) <= set(value)
    assert value["size"] is None or type(value["size"]) is int
    assert value["kind"] in ("leaf", "a b", 3) and isinstance(value["odd key"], bool)
    assert isinstance(value.get("note", ""), str | int | float)
    return all(map(is_tree, value.get("below", [])))


@examples(20)
@given(st.integers(0, 2**32))
def test_drawn_values_follow_the_schema(seed):
    grammar = tool_grammar(FORMAT, [Function("f", SCHEMA, True)], SPECIALS, required=True, parallel=False)
    ids = walk(GUIDES.take(GUIDES.begin(grammar)), seed, limit=300)
    if ids is None:
        return
    parser = Parser(FORMAT, {"f": SCHEMA})
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    (call,) = ParsedMessage.of([*parser.push(text), *parser.finish()]).calls
    assert is_tree(json.loads(call.arguments)["root"])


@pytest.mark.parametrize("value", [{}, True, {"type": "object"}, {"type": "array"}, {"properties": {"a": {}}}])
@pytest.mark.parametrize("seed", range(3))
def test_unconstrained_values_are_any_json(value, seed):
    schema = {"type": "object", "properties": {"x": value}, "required": ["x"]}
    grammar = tool_grammar(FORMAT, [Function("f", schema)], SPECIALS, required=True, parallel=False)
    ids = walk(GUIDES.take(GUIDES.begin(grammar)), seed, limit=200)
    if ids is not None:
        parser = Parser(FORMAT, {"f": schema})
        text = TOKENIZER.decode(ids, skip_special_tokens=False)
        (call,) = ParsedMessage.of([*parser.push(text), *parser.finish()]).calls
        assert "x" in json.loads(call.arguments), text


@pytest.mark.parametrize("choice", [{"enum": ["a"]}, {"const": "a"}, {"anyOf": [{"enum": ["a"]}]}, {"type": "boolean"}])
def test_nullable_values_may_be_null(choice):
    schema = {"type": "object", "properties": {"x": {**choice, "nullable": True}}, "required": ["x"]}
    grammar = tool_grammar(FORMAT, [Function("f", schema, True)], SPECIALS, required=True, parallel=False)
    begun = next(iter(FORMAT.calls.begins)) + "call:f{x:null}"
    GUIDES.take(GUIDES.begin(grammar), ids_of(begun))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "string", "minLength": 2}, "'minLength'"),
        ({"$ref": "#/$defs/no"}, "#/\\$defs/no"),
        ({"type": "banana"}, "banana"),
        ({"$ref": "#/properties/x", "required": ["a"]}, "'required'.*'\\$ref'"),
        ({"anyOf": [{"type": "string"}], "type": "string"}, "'type' beside 'anyOf'"),
        ({"anyOf": [{}], "oneOf": [{}]}, "'oneOf' beside 'anyOf'"),
        ({"enum": []}, "'enum'"),
        ({"type": "object", "required": 7, "properties": {"a": {}}}, "'required'"),
        ({"type": "object", "required": [[]]}, "'required'"),
        ({"type": "object", "properties": 7}, "'properties'"),
    ],
)
def test_a_strict_tool_is_enforced_or_refused(schema, message):
    whole = {"type": "object", "properties": {"x": schema}}
    with pytest.raises(InvalidRequest, match=message):
        tool_grammar(FORMAT, [Function("f", whole, True)], SPECIALS)
