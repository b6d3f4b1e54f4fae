"""Schemas in other words: what is accepted is exactly what JSON Schema says, as an independent validator reads it."""

from __future__ import annotations

import json
import re
from contextlib import suppress

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schemas.writer import Writer, bytes_tokenizer
from kvasir.errors import InvalidRequest
from kvasir.guided import sources
from kvasir.guided.cases import enforceable
from kvasir.guided.formats import FORMATS
from kvasir.guided.logic import KEYWORDS
from kvasir.guided.pointers import Pointers
from kvasir.guided.schema import prepared
from kvasir.guided.summary import Summary
from tests.examples import examples

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
    """Whether the schema is neither refused nor beyond the limits of the parser; it is exact then."""
    found = writer(schema)
    if found is None:
        return False
    valid = jsonschema_rs.validator_for(schema)
    wrong = [(value, valid.is_valid(value)) for value in values if found.writes(value) != valid.is_valid(value)]
    accepted = [value for value, is_valid in wrong if not is_valid]
    assert not (accepted if found.limited else wrong), (schema, wrong)
    return not found.limited


def keyed(value, *needed):
    return {"if": {"properties": {"k": {"const": value}}, "required": ["k"]}, "then": {"required": list(needed)}}


def of_kind(value, then):
    """A condition that holds as well where there is no k."""
    return {"if": {"properties": {"k": {"const": value}}}, "then": then}


def by_turns(*keys):
    """Where one key is there and not null, the others are null or absent."""
    null = {key: {"const": None} for key in keys}
    summary = []
    for key in keys:
        others = {other: null[other] for other in keys if other != key}
        summary.append({"if": {"not": {"properties": {key: null[key]}}}, "then": {"properties": others}})
    return {"type": "object", "properties": {key: {} for key in keys}, "additionalProperties": False, "allOf": summary}


CLOSED = {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False}
TOP = 2**63 - 1
SAID = [
    ({"not": {"type": ["number", "string"]}}, [None, [1]], [1, 1.5, "a"]),
    ({"type": "string", "not": {"enum": ["foo", "fo", "bar"]}}, ["f", "", "foob", "x", "ba"], ["foo", "fo", "bar"]),
    ({"type": "string", "not": {"pattern": "^x-"}}, ["", "x", "y-"], ["x-", "x-a"]),
    ({"not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}, 1]),
    ({"type": "integer", "not": {"const": 5}}, [4, 6], [5]),
    ({"oneOf": [{"$ref": "#/$defs/s"}, {"type": "null"}], "$defs": {"s": {"enum": ["a"]}}}, ["a", None], ["b"]),
    ({**CLOSED, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
    ({"oneOf": [{"enum": ["any", "none"]}, {"type": "string", "pattern": "^a"}]}, ["none", "a"], ["any", "b"]),
    ({"oneOf": [{"type": "string", "pattern": "^a-"}, {"type": "string", "pattern": "^b"}]}, ["a-", "b"], ["c"]),
    ({"oneOf": [{"properties": {"a": {"type": "string"}}, "additionalProperties": False},
                {"properties": {"b": {"type": "string"}}, "additionalProperties": False}]},
     [{"a": "x"}, {"b": "x"}], [{}, 1, {"a": "x", "b": "x"}]),
    ({"properties": {"k": {"enum": ["x", "y"]}}, "required": ["k"], "if": {"properties": {"k": {"const": "x"}}},
      "then": {"required": ["a"]}, "else": {"required": ["b"]}},
     [{"k": "x", "a": 1}, {"k": "y", "b": 1}], [{"k": "x"}, {"k": "y", "a": 1}]),
    ({"type": "object", "allOf": [keyed("x", "a"), keyed("y", "b"), keyed("z", "c")]},
     [{"k": "x", "a": 1}, {"k": "w"}, {}], [{"k": "x"}, {"k": "y", "a": 1}]),
    ({"dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 1}, 3], [{"a": 1}]),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": {"required": ["b"]}}},
     [{}, {"a": 1, "b": 1}], [{"a": 1}]),
    ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True}, [[], ["c", "a"]], [["a", "a"]]),
    ({"type": "array", "contains": {"const": 5}, "maxItems": 4}, [[5], [1, 5]], [[], [1]]),
    ({"type": "array", "contains": {"const": 5}, "maxContains": 1, "maxItems": 3}, [[5], [1, 5]], [[5, 5], []]),
    ({"propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {"type": "integer"}}, [{"a": 1}, {}],
     [{"A": 1}, {"a": "x"}]),
    ({"propertyNames": {"enum": ["p", "q"]}}, [{"p": 1}, {}], [{"A": 1}]),
    ({**CLOSED, "minProperties": 2, "maxProperties": 2}, [{"a": 1, "c": 1}], [{"a": 1}, {"a": 1, "b": 1, "c": 1}]),
    ({"type": "object", "properties": {"a": {}}, "maxProperties": 1}, [{}, {"a": 1}, {"z": 1}], [{"a": 1, "z": 1}]),
    ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, [{"z": 1}, {"a": 1, "z": 1}], [{}]),
    ({**CLOSED, "minProperties": 2**53 + 1, "type": ["object", "null"]}, [None], [{}, {"a": 1, "c": 1}]),
    ({"type": "integer", "minimum": 0, "maximum": TOP}, [TOP, 2**60 + 1], [TOP + 1, -1]),
    ({"type": "integer", "minimum": -TOP - 1, "maximum": 2**64 - 1}, [TOP, -(2**60) - 1], [-(2**64)]),
    ({"enum": [2**60]}, [2**60], [2**60 + 1]),
    ({"type": "string", "format": "color"}, ["red"], [1]),
    ({"format": "date"}, ["2024-02-29"], ["2023-02-29", "2024-13-01"]),
    ({"format": "date-time"}, ["2024-02-29T12:00:00+05:30", "1990-12-31T15:59:60-08:00"], ["1998-12-31T23:58:60Z"]),
    ({"format": "email"}, ['"joe bloggs"@example.com', "a@[IPv6:::1]"], ["a@b@c", "a..b@c.d"]),
    ({"format": "ipv6"}, ["::", "1::d6:192.168.0.1"], ["1::2::3", "::12345"]),
    ({"format": "uri-reference"}, ["/a/b#c", "", "http://a/b"], ["\\\\a", "a b"]),
    ({"format": "iri"}, ["http://ƒøø.com/ßar"], ["/a", "http://a b"]),
    ({"format": "json-pointer"}, ["", "/a~1b/0"], ["a", "/~2"]),
    ({"format": "uri-template"}, ["/a/{b,c}{?d*}"], ["/a/{b"]),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a", "maxItems": 1,
      "definitions": {"a": {"type": "array"}}}, [[1, 2]], [1]),
    ({"properties": {"a": {"oneOf": [{"type": "null"}, {"type": "string"}]}, "b": {"$ref": "#/properties/a/oneOf/1"}}},
     [{"a": None, "b": "x"}], [{"b": None}]),
    ({"type": "string", "pattern": "^\\S$"}, ["a"], ["\ufeff", "\u2028"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), SAID, ids=lambda value: str(value)[:60])
def test_a_keyword_is_enforced(schema, good, bad):
    found = Writer(TOKENIZER, sources.json_schema(schema))
    assert [value for value in good if not found.writes(value)] == []
    assert [value for value in bad if found.writes(value)] == []
    valid = jsonschema_rs.validator_for(schema, validate_formats=True)
    assert all(map(valid.is_valid, good)) and not any(map(valid.is_valid, bad))


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"const": 5}}, "contains"),
        ({"not": {"type": "integer"}}, "not"),
        ({"not": {"multipleOf": 2}}, "not"),
        ({"if": {"format": "uuid"}, "then": {"maxLength": 3}}, "if"),
        ({"format": "idn-hostname"}, "format"),
        ({"propertyNames": {"pattern": "^a"}, "properties": {"b": {}}}, "propertyNames"),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 3}, "minProperties"),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum"),
        ({"exclusiveMaximum": -1, "minimum": -1.5}, "exclusiveMaximum"),
        ({"type": "number", "exclusiveMinimum": 2, "allOf": [{"exclusiveMaximum": 2.5}]}, "exclusiveMinimum"),
        ({"allOf": [{"type": "number", "exclusiveMaximum": 1.5}, {"exclusiveMinimum": 1}]}, "exclusiveMinimum"),
        ({"type": "number", "exclusiveMinimum": 0, "not": {"minimum": 0.5}}, "exclusiveMinimum"),
    ],
)
def test_conditions_that_cannot_be_expressed_exactly_are_refused_by_name(schema, keyword):
    for whole in (schema, {"type": "array", "items": schema}, {"anyOf": [{}, schema]}):
        with pytest.raises(InvalidRequest, match=f"^{keyword}: "):
            sources.json_schema(whole)
        sources.json_schema(whole, lenient=True)


BOUNDS = st.dictionaries(
    st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
    st.sampled_from([-2, -0.5, 0, 0.5, 1, 1.5, 2, 2.5]),
    min_size=1,
    max_size=2,
)


@examples(100)
@given(
    st.lists(BOUNDS, min_size=2, max_size=3),
    st.sampled_from(["number", "integer"]),
    st.sampled_from(["allOf", "anyOf", "not", "$ref"]),
)
def test_bounds_stated_in_several_places_apply_together(bounds, kind, key):
    one, *others = bounds
    rest = {"not": others[0], "$ref": "#/$defs/d"}.get(key, others)
    schema = {"type": kind, **one, key: rest, "$defs": {"d": {"type": kind, **others[0]}}}
    valid = jsonschema_rs.validator_for(schema)
    values = [n / 4 for n in range(-12, 13)] + [*range(-3, 4)]
    try:
        found = Writer(TOKENIZER, sources.json_schema(schema))
    except (InvalidRequest, ValueError):  # it is refused, or allows nothing at all
        return
    assert [v for v in values if found.writes(v) and not valid.is_valid(v)] == []
    assert [v for v in values if isinstance(v, int) and valid.is_valid(v) and not found.writes(v)] == []


def test_many_bounds_take_no_time_to_speak_of():
    some = [{"minimum": n + 0.5, "exclusiveMaximum": n + 5} for n in range(4000)]
    with pytest.raises((InvalidRequest, ValueError)):
        Writer(TOKENIZER, sources.json_schema({"anyOf": some, "allOf": [{"anyOf": some}]}))


def test_work_on_a_hostile_schema_has_a_bound():
    choices = [{"properties": {f"k{i}": {"type": "string", "pattern": "a"}}} for i in range(60)]
    for _ in range(3):
        choices = [{"oneOf": choices}, {"not": {"oneOf": choices}}]
    with pytest.raises((InvalidRequest, ValueError)):
        Writer(TOKENIZER, sources.json_schema({"oneOf": choices}))


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


WORDS = st.sampled_from([*sorted(KEYWORDS), "$defs", "$schema", "$id", "a"])
ODD = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.sampled_from(["#", "#/$defs/a", "object", "^a", "date"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=4)),
    max_leaves=12,
)


@examples(200)
@given(st.dictionaries(WORDS, ODD, max_size=5), st.booleans())
def test_any_schema_is_translated_or_refused(schema, lenient):
    with suppress(InvalidRequest):
        sources.json_schema(schema, lenient)


DRAFTS = st.sampled_from(["draft-04", "draft-06", "draft-07", "draft/2019-09", "draft/2020-12"])
OF_DRAFTS = st.sampled_from([
    {"$ref": "#/properties/p"}, {"$ref": "#/$defs/d", "type": "string"}, {"items": [{"type": "null"}]},
    {"minimum": 1, "exclusiveMinimum": True}, {"$id": "#a"}, {"$id": "b.json"}, {"id": "#a", "const": 1},
    {"x": {"$id": "c"}}, {"dependencies": {"a": {"$ref": "#/properties/p"}}}, {"type": "integer", "nullable": True},
    {"enum": ["a"], "anyOf": [{"type": "string"}], "type": "string"}, {"properties": {"id": {"$ref": "#/$defs/d"}}},
])  # fmt: skip


def enforced(schema, lenient, summary):
    try:
        return json.dumps(enforceable(prepared(schema, lenient, summary), lenient, summary))
    except InvalidRequest as error:
        return error.message


@examples(300)
@given(st.one_of(SCHEMAS, OF_DRAFTS), st.one_of(SCHEMAS, OF_DRAFTS), DRAFTS, st.booleans())
def test_steps_that_are_left_out_have_nothing_to_do(one, other, draft, lenient):
    root = {"properties": {"p": one, "q": {"anyOf": [other, {"type": "null"}]}}, "$defs": {"d": other}}
    for schema in (root, {"$schema": f"http://json-schema.org/{draft}/schema", **root}):
        assert enforced(schema, lenient, summary=None) == enforced(schema, lenient, Summary())


@examples(150)
@given(SCHEMAS, LEAVES)
def test_a_schema_is_exact_or_refused(schema, definition):
    if isinstance(schema, dict):
        definition = {"type": "string"} if isinstance(definition, dict) and "$ref" in definition else definition
        check({**schema, "$defs": {"d": definition}})


def test_conditions_on_a_key_that_may_be_absent_are_exact():
    summary = [
        of_kind("a", {"required": ["b"]}),
        of_kind("b", {"properties": {"b": {"type": "integer"}}}),
        of_kind(1, False),
    ]
    values = [{"k": k, **b} for k in ("a", "b", 1, 1.5, None) for b in ({}, {"b": 1}, {"b": "a"})]
    assert check({"properties": {"k": {}, "b": {}}, "allOf": summary}, (*VALUES, *values))


@pytest.mark.parametrize("more", [{}, {"type": "object"}, {"type": ["object", "null"]}])
@pytest.mark.parametrize("absent", [[], [of_kind("c", {"required": ["c"]})]], ids=["", "or absent"])
def test_conditions_on_a_key_that_is_required_are_exact(more, absent):
    summary = [keyed("a", "a"), keyed("b", "b", "c"), keyed(1), *absent]
    others = [{}, {"a": 1}, {"b": 1, "c": 1}, {"c": 1}]
    values = [{"k": k, **other} for k in ("a", "b", "c", 1, 1.5, None) for other in others]
    assert check({**more, "properties": {"k": {}, "a": {}, "b": {}, "c": {}}, "allOf": summary}, (*VALUES, *values))


def test_a_choice_that_holds_anyway_is_left_out():
    one = {"properties": {key: {"anyOf": [{"type": "string"}, {"type": "null"}]} for key in "abcd"}}
    schema = {"allOf": [{"$ref": "#/$defs/d"}], "anyOf": [{"type": "null"}, {"$ref": "#/$defs/d"}], "$defs": {"d": one}}
    assert check(schema) and "null" not in sources.json_schema(schema).split("$defs")[0]
    assert not check({"allOf": [{"const": 1}], "anyOf": [{"const": True}]})  # of which nothing is


def test_keys_that_exclude_each_other_are_exact():
    values = [{"a": a, "b": b, "c": c} for a in (None, 1) for b in (None, 1) for c in (None, 1)]
    assert check(by_turns("a", "b", "c"), (*VALUES, *values))


def test_many_conditions_are_no_product_of_their_cases():
    """Of 16 conditions there are 2^16 combinations."""
    keys, many = ([f"k{i:02}" for i in range(count)] for count in (16, 90))
    turns = writer(by_turns(*keys))
    assert turns and turns.writes({"k07": 1, "k08": None}) and not turns.writes({"k07": 1, "k08": 1})
    for summary in ([of_kind(k, {"required": [k]}) for k in keys], [keyed(k, k) for k in many]):
        kinds = writer({"type": "object", "properties": {"k": {}}, "allOf": summary})
        assert kinds and kinds.writes({"k": "k07", "k07": 1}) and not kinds.writes({"k": "k07", "k08": 1})


def test_conditions_that_are_too_many_are_refused():
    with pytest.raises(InvalidRequest, match="cases"):
        sources.json_schema(by_turns(*(f"k{i:02}" for i in range(90))))


def test_repeated_long_patterns_are_compiled_once():
    when = {"type": "string", "format": "date-time"}
    schema = {"properties": {"a": when, "b": {"type": "array", "items": when}}, "$defs": {"text-0": {"type": "null"}}}
    assert sources.json_schema(schema).count("60(?:") <= sources.json_schema({"properties": {"a": when}}).count("60(?:")
    found, good, bad = writer(schema), "2024-02-29T12:00:00Z", "2023-02-29T12:00:00Z"
    assert found and found.writes({"a": good, "b": [good]})
    assert not any(found.writes(value) for value in ({"a": bad}, {"a": None}, {"b": [bad]}))


def test_leap_seconds_are_the_last_of_a_day_in_utc():
    minutes = range(0, 24 * 60, 15)
    utc, local = 23 * 60 + 59, lambda at: f"{at % 1440 // 60:02}:{at % 60:02}:60"
    zones = [(f"{sign}{m // 60:02}:{m % 60:02}", m if sign == "+" else -m) for m in minutes for sign in "+-"]
    pattern = re.compile(FORMATS["time"] or "")
    for zone, east in zones:
        found = [at for at in range(1440) if pattern.match(local(at) + zone)]
        assert found == [(utc + east) % 1440], zone


def test_a_choice_beyond_the_parsers_limits_is_never_too_wide():
    """Its alternatives are counted where they are joined, and none is written that needs too many of them."""
    some = {"contains": {"type": "string"}, "maxContains": 1, "maxItems": 3}
    assert check({"allOf": [some, some]}) and not check({"allOf": [some, some, some]})
    none = {**some, "contains": False}
    assert check({"allOf": [none, none, none]})


@pytest.mark.slow
@settings(max_examples=20_000, deadline=None)
@given(SCHEMAS, LEAVES)
def test_many_schemas_are_exact_or_refused(schema, definition):
    if isinstance(schema, dict):
        definition = {"type": "string"} if isinstance(definition, dict) and "$ref" in definition else definition
        check({**schema, "$defs": {"d": definition}})


def test_definitions_keep_their_names_where_references_are_moved():
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema = {
        "type": "array",
        "prefixItems": [inner, {"$ref": "#/prefixItems/0/properties/a"}, {"$ref": "#/$defs/moved-0"}],
        "$defs": {"moved-0": {"type": "boolean"}},
    }
    reported = Pointers(schema).schema
    assert reported["$defs"] == {"moved-0": {"type": "boolean"}, "moved-1": {"type": "integer"}}
    assert reported["prefixItems"][1:] == [{"$ref": "#/$defs/moved-1"}, {"$ref": "#/$defs/moved-0"}]


def test_definitions_that_are_no_object_are_refused():
    with pytest.raises(InvalidRequest, match="not an object"):
        Pointers({"$defs": "x", "items": {"$ref": "#/properties"}, "properties": {}})
