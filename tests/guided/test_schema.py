"""Schemas made ready: nothing that constrains is passed over in silence, and what asks for nothing is no error."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest

from kvasir.errors import InvalidRequest
from kvasir.guided import sources
from kvasir.guided.guide import GuideError
from kvasir.guided.schema import prepared
from kvasir.guided.tools import Function, tool_grammar
from kvasir.parse.format import Format
from kvasir.parse.table import choose
from tests.guided.walk import SPECIALS, TOKENIZER, ids_of, make_guides

GUIDES = make_guides()


def allows(schema, text: str) -> bool:
    guide = GUIDES.take(GUIDES.begin(sources.json_schema(schema)))
    try:
        guide.advance(TOKENIZER.encode(text, add_special_tokens=False))
    except GuideError:
        return False
    return guide.complete


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"enum": [1, 12345678901234567890]}, "enum"),
        ({"const": 2**53 + 1}, "const"),
        ({"const": {"a": [2**70]}}, "const"),
        ({"type": "integer", "minimum": 2**53 + 1}, "minimum"),
        ({"type": "number", "maximum": 2**60}, "maximum"),
        ({"type": ["number", "null"], "exclusiveMinimum": -(2**64)}, "exclusiveMinimum"),
        ({"multipleOf": 2**60}, "multipleOf"),
        ({"extends": {}}, "extends"),
        ({"disallow": ["string"]}, "disallow"),
        ({"divisibleBy": 2}, "divisibleBy"),
        ({"properties": {"a": {"type": "string", "required": True}}}, "required"),
        ({"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}}, "minProperties"),
    ],
)
def test_keywords_that_cannot_be_enforced_are_refused_by_name_at_any_depth(schema, keyword):
    for whole in (schema, {"type": "array", "items": schema}, {"$defs": {"x": schema}}, {"anyOf": [{}, schema]}):
        with pytest.raises(InvalidRequest, match=f"^{keyword}: "):
            sources.json_schema(whole)
        assert f'"{keyword}": ' not in sources.json_schema(whole, lenient=True).replace('"required": []', "")


def test_names_of_properties_and_values_are_no_keywords():
    schema = {"type": "object", "properties": {"extends": {"const": "disallow"}, "description": {"type": "string"}}}
    assert prepared(schema) == schema
    assert prepared({"enum": [{"extends": 1, "title": "x"}]}) == {"enum": [{"extends": 1, "title": "x"}]}
    assert prepared(True) is True and prepared({"const": 2**53}) == {"const": 2**53}


def test_keywords_without_effect_are_dropped():
    assert prepared({"uniqueItems": False, "propertyNames": True, "nullable": False, "description": "d"}) == {}
    assert allows({"type": "string", "minLength": 2.0}, '"ab"') and not allows(
        {"type": "string", "minLength": 2.0}, '"a"'
    )
    assert allows({"type": "array", "uniqueItems": False, "items": {"const": 1}}, "[1, 1]")


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf", "enum", "type", "items", "properties", "required"])
@pytest.mark.parametrize("value", [1024, None, "text", True, 1.5, {"a": 1}, [1], [[]]])
def test_a_keyword_of_the_wrong_type_is_a_refusal_at_worst(keyword, value):
    for more in ({"nullable": True}, {"nullable": True, "const": 1}, {}):
        with suppress(InvalidRequest):
            prepared({keyword: value, **more})


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer"}, "7"),
        ({"type": ["integer", "string"]}, '"a"'),
        ({"enum": ["a", "b"]}, '"b"'),
        ({"type": "string", "enum": ["a", "b"]}, '"b"'),
        ({"const": 3}, "3"),
        ({"anyOf": [{"type": "integer"}]}, "7"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, "7"),
    ],
)
def test_nullable_allows_null_as_well(schema, text):
    for inner, wrap in ((schema, "{}"), ({"type": "array", "items": {k: v for k, v in schema.items()}}, "[{}]")):
        whole = (
            {**inner, "nullable": True} if wrap == "{}" else {**inner, "items": {**inner["items"], "nullable": True}}
        )
        whole |= {"$defs": schema["$defs"]} if "$defs" in schema else {}
        assert allows(whole, wrap.replace("{}", text)) and allows(whole, wrap.replace("{}", "null"))
        assert not allows(whole, wrap.replace("{}", "true"))


def test_a_tool_that_is_strict_is_refused_by_name_and_another_is_not():
    schema = {"type": "object", "properties": {"id": {"enum": [2**60 + 1]}}}
    format = Format(choose(tools="hermes").calls)
    with pytest.raises(InvalidRequest, match="enum: 1152921504606846977"):
        tool_grammar(format, [Function("f", schema, True)], SPECIALS)
    GUIDES.take(GUIDES.begin(tool_grammar(format, [Function("f", schema)], SPECIALS)))


def test_thousands_of_choices_are_one_regular_expression():
    texts = [f"choice number {i} of many" for i in range(4096)]
    guide = GUIDES.take(GUIDES.begin(sources.choice(texts)))
    guide.advance(TOKENIZER.encode("choice number 4095 of many", add_special_tokens=False))
    assert guide.complete


def test_a_schema_without_bottom_is_refused():
    schema: dict = {}
    for _ in range(100_000):
        schema = {"not": schema}
    with pytest.raises(InvalidRequest, match="too deeply"):
        prepared(schema)
    json.dumps(prepared({"not": {"not": {}}}))


NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize("free", [{"additionalProperties": {"type": "null"}}, {}, {"patternProperties": {"^b": {}}}])
def test_no_free_key_is_a_named_one(free):
    compiled = GUIDES.begin(sources.json_schema(NAMED | free))
    for key in ("a", "\\u0061", "b\\u0061"):
        with pytest.raises(GuideError):
            GUIDES.take(compiled, ids_of(f'{{"a": 1, "{key}": null'))
    GUIDES.take(compiled, ids_of('{"a": 1, "b\\n\\"": null'))


@pytest.mark.parametrize("text", ["a\x01", "\x7f", "\x0b"])
def test_control_characters_in_texts_are_refused(text):
    for key, reply in (("const", text), ("enum", ["b", {text: 1}]), ("properties", {text: {}}), ("required", [text])):
        with pytest.raises(InvalidRequest, match=f"^{key}: .*control characters"):
            sources.json_schema({key: reply})
    assert allows({"const": '\n\t\\"/é'}, json.dumps('\n\t\\"/é', ensure_ascii=False))
