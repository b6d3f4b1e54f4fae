"""Schemas in other words: what is accepted is exactly what JSON Schema says, as an independent validator reads it."""

from __future__ import annotations

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schemas.writer import Writer, bytes_tokenizer
from kvasir.errors import InvalidRequest
from kvasir.guided import sources

TOKENIZER = bytes_tokenizer()
TEXTS = ("", "a", "b", "ab", "ba", "c d")
SCALARS = (None, True, False, 0, 1, 2, 5, 1.5, -1, *TEXTS)
LISTS = ([], ["a"], ["a", "a"], ["a", "b"], [1], [1, 2], [1, 1, 2], [None, "b", 5], [[], []], [{}])
OBJECTS = ({}, {"a": 1}, {"a": "a"}, {"b": 1}, {"a": 1, "b": "a"}, {"c": 0}, {"a": 5, "c": 1}, {"b": 2, "c": 2},
           {"a": "b", "b": "b", "c": "b"}, {"ab": True}, {"a": {"a": 1}}, {"a": {}, "b": []})  # fmt: skip
VALUES = (*SCALARS, *LISTS, *OBJECTS)


def writer(schema) -> Writer | None:
    """None where it is refused."""
    try:
        return Writer(TOKENIZER, sources.json_schema(schema))
    except (InvalidRequest, ValueError):
        return None


def check(schema, values=VALUES) -> bool:
    """Whether the schema is not refused; it is exact then."""
    found = writer(schema)
    if found is not None:
        valid = jsonschema_rs.validator_for(schema)
        wrong = [(value, valid.is_valid(value)) for value in values if found.writes(value) != valid.is_valid(value)]
        assert not wrong, (schema, wrong)
    return found is not None


NAMES = st.sampled_from(["a", "b", "c"])
COUNTS = st.integers(0, 3)
KINDS = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
PATTERNS = st.sampled_from(["^a", "b$", "^(a|b)$", "^ab?$", "a", "^(?:ab|c d)$", "^[a-c]+$", "\\\\s"])
SOME = st.lists(st.sampled_from(SCALARS), min_size=1, max_size=4, unique_by=repr)
LEAVES = st.one_of(
    st.booleans(),
    st.builds(lambda kind: {"type": kind}, KINDS),
    st.builds(lambda kinds: {"type": kinds}, st.lists(KINDS, min_size=1, max_size=3, unique=True)),
    st.builds(lambda value: {"const": value}, st.sampled_from(VALUES)),
    st.builds(lambda values: {"enum": values}, SOME),
    st.builds(lambda kind, pattern: {"type": kind, "pattern": pattern}, st.sampled_from(["string"]), PATTERNS),
    st.builds(lambda low: {"minimum": low, "type": "integer"}, st.integers(-1, 5)),
    st.builds(lambda high: {"exclusiveMaximum": high}, st.integers(-1, 5)),
    st.builds(lambda names: {"required": names}, st.lists(NAMES, max_size=2, unique=True)),
    st.builds(lambda n: {"minLength": n}, COUNTS),
    st.builds(lambda n: {"maxItems": n}, COUNTS),
    st.builds(lambda a, b: {"dependentRequired": {a: [b]}}, NAMES, NAMES),
    st.just({"$ref": "#/$defs/d"}),
)


def around(inner):
    many = st.lists(inner, min_size=1, max_size=3)
    properties = st.dictionaries(NAMES, inner, max_size=3)
    closed = st.sampled_from([{}, {"additionalProperties": False}, {"type": "object"}])
    return st.one_of(
        st.builds(lambda schemas: {"oneOf": schemas}, many),
        st.builds(lambda schemas: {"anyOf": schemas}, many),
        st.builds(lambda schemas: {"allOf": schemas}, many),
        st.builds(lambda schema: {"not": schema}, inner),
        st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, inner, inner, inner),
        st.builds(lambda a, b: {"if": a, "then": b}, inner, inner),
        st.builds(lambda p, n, more: {"properties": p, "required": n, **more}, properties,
                  st.lists(NAMES, max_size=1), closed),
        st.builds(lambda p, n: {"type": "object", "properties": p, "minProperties": n}, properties, COUNTS),
        st.builds(lambda p, n, more: {"properties": p, "maxProperties": n, **more}, properties, COUNTS, closed),
        st.builds(lambda name, schema: {"dependentSchemas": {name: schema}}, NAMES, inner),
        st.builds(lambda schema, n: {"contains": schema, "maxItems": n}, inner, COUNTS),
        st.builds(lambda s, n, m: {"contains": s, "minContains": n, "maxContains": m, "maxItems": 3}, inner, COUNTS,
                  COUNTS),
        st.builds(lambda schema: {"type": "array", "items": schema, "uniqueItems": True}, inner),
        st.builds(lambda schema, n: {"items": schema, "minItems": n}, inner, COUNTS),
        st.builds(lambda schemas: {"prefixItems": schemas, "items": False, "uniqueItems": True}, many),
        st.builds(lambda schema, free: {"propertyNames": schema, "additionalProperties": free}, inner, inner),
        st.builds(lambda a, b: {**a, **b} if isinstance(a, dict) and isinstance(b, dict) else a, inner, inner),
    )  # fmt: skip


SCHEMAS = st.recursive(LEAVES, around, max_leaves=6)


@settings(max_examples=150, deadline=None)
@given(SCHEMAS, LEAVES)
def test_a_schema_is_exact_or_refused(schema, definition):
    if isinstance(schema, dict):
        definition = {"type": "string"} if isinstance(definition, dict) and "$ref" in definition else definition
        check({**schema, "$defs": {"d": definition}})


@pytest.mark.slow
@settings(max_examples=20_000, deadline=None)
@given(SCHEMAS, LEAVES)
def test_many_schemas_are_exact_or_refused(schema, definition):
    if isinstance(schema, dict):
        definition = {"type": "string"} if isinstance(definition, dict) and "$ref" in definition else definition
        check({**schema, "$defs": {"d": definition}})
