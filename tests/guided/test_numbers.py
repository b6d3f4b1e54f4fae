"""Numbers that no double and no 64-bit integer could hold are not written, and nothing else is forbidden for it."""

from __future__ import annotations

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.guided import sources
from kvasir.guided.numbers import fits
from kvasir.guided.tools import Function, tool_grammar
from kvasir.parse.table import choose
from tests.guided.walk import SPECIALS, TOKENIZER, VOCABULARY, allowed_ids, ids_of, make_guides
from tests.parse.writing import format_of, written

GUIDES = make_guides()
NUMBER = sources.json_schema({"type": "number"})
DIGITS = [i for i, data in VOCABULARY.spellings if data.isdigit()]


def write(rule: str, begin: str, wanted: str, limit: int = 120) -> str:
    """Text whose tokens begin with one of the given characters as long as possible, then with the lowest allowed
    one."""
    guide = GUIDES.take(GUIDES.begin(rule), ids_of(begin))
    text = begin
    for _ in range(limit):
        if guide.done:
            return text
        allowed = [i for i in allowed_ids(guide) if i not in TOKENIZER.eos_ids]
        if not allowed:
            return text
        texts = {i: TOKENIZER.token_bytes(i).decode("latin-1") for i in allowed}
        token = next((i for c in wanted for i in allowed if texts[i][:1] == c), allowed[0])
        guide.advance([token])
        text += texts[token]
    pytest.fail(f"no end: {text}")


@pytest.mark.parametrize("wanted", ["9", "1", "0", ".9", "e9", "E+9", "-9", "-9.9e9"])
@pytest.mark.parametrize("kind", ["number", "integer"])
def test_a_number_ends_and_can_be_held(kind, wanted):
    value = json.loads(write(sources.json_schema({"type": kind}), "", wanted))
    assert math.isfinite(value) and (kind == "number" or -(2**63) <= value < 2**64)


@pytest.mark.parametrize("rule", [
    sources.json_object(),
    sources.json_schema({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "number"}}}}),
    sources.json_schema({"type": "object", "properties": {"a": {"type": "array", "items": {}}}}),
    sources.structural_tags([sources.Tag('{"a": [', {"type": "number"}, "]}")], ['{"a'], SPECIALS),
])  # fmt: skip
@pytest.mark.parametrize("wanted", ["9", "9.e", "9e"])
def test_so_does_one_in_the_midst_of_other_text(rule, wanted):
    guide = GUIDES.take(GUIDES.begin(rule), ids_of('{"a": ['))
    text = ""
    while not text.endswith(("]", ",")) and len(text) < 200:
        allowed = {i: TOKENIZER.token_bytes(i).decode("latin-1") for i in allowed_ids(guide)}
        token = next((i for c in wanted + "],\n " for i, t in allowed.items() if t[:1] == c), next(iter(allowed)))
        guide.advance([token])
        text += allowed[token]
    assert math.isfinite(json.loads(re.match(r"[-+.eE0-9]+", text)[0])), text


def test_so_do_arguments_and_numbers_of_calls():
    parameters = {"properties": {"n": {"type": "number"}}, "required": ["n"], "additionalProperties": False}
    calls = tool_grammar(
        choose(tools="hermes"), [Function("f", parameters)], SPECIALS,
        required=True, parallel=False, ends=VOCABULARY.ends,
    )  # fmt: skip
    begin = '<tool_call>\n{"name": "f", "arguments": {"n": '
    text = write(calls, begin, "9")
    assert re.search(r'"n": [0-9.E]{1,60}}', text), text


@pytest.mark.parametrize("text", [
    "4.1e+58727219", "1e309", "1e999", "-1e309", "9" * 21, str(2**64), str(-(2**63) - 1), "0." + "1" * 21, "1e0001",
])  # fmt: skip
def test_beyond(text):
    assert not fits(text.encode())
    with pytest.raises(ValueError, match="not allowed"):
        follow(NUMBER, text)


@given(
    st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False, min_value=-1e15, max_value=1e15)
)
def test_representable_numbers_are_allowed(value):
    follow(NUMBER, json.dumps(value))


@pytest.mark.parametrize(
    "text", ["1.7976931348623157e308", "5e-324", "2.2250738585072014e-308", "6.02214076e+23", "0.1"]
)
def test_extremes_are_allowed(text):
    follow(NUMBER, text)


@pytest.mark.parametrize(("rule", "text"), [
    (sources.json_schema({"type": "string"}), f'"{"1" * 40}"'),
    (sources.json_schema({"type": "string", "pattern": "^[0-9]+$"}), f'"{"1" * 40}"'),
    (sources.json_schema({"type": "string", "pattern": "^[0-9]{40}$"}), f'"{"1" * 40}"'),
    (sources.json_schema({"type": "string", "pattern": "^[0-9]+,[0-9]+$"}), f'"{"1" * 40},{"2" * 40}"'),
    (sources.regex("[0-9]+"), "1" * 40),
])  # fmt: skip
def test_digit_counts_reach_their_bounds(rule, text):
    follow(rule, text)


def follow(rule: str, text: str) -> None:
    guide = GUIDES.take(GUIDES.begin(rule))
    for token in ids_of(text):
        if token not in allowed_ids(guide):
            raise ValueError(f"{TOKENIZER.token_text(token)!r} is not allowed")
        guide.advance([token])
    assert guide.complete


@pytest.mark.parametrize("name", ["hermes", "mistral"])
@pytest.mark.parametrize("before", ["", "id "])
def test_digits_in_a_text_of_a_call_have_no_bound(name, before):
    text = f"{before}{'1' * 40},{'2' * 40}"
    properties = {"a": {"type": "string", "pattern": f"^{before}[0-9]+,[0-9]+$"}, "b": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["a", "b"], "additionalProperties": False}
    format = format_of(name)
    reply = {"required": True, "parallel": True, "opened": False, "content": None}
    rule = tool_grammar(format, [Function("f", schema)], SPECIALS, ends=frozenset(), thinks=False, **reply)
    call = written(format, [("f", {"a": text, "b": int("3" * 40)})])
    guide, rest, ids = GUIDES.take(GUIDES.begin(rule)), call, list[int]()
    while not rest.startswith("3" * 20):
        fitting = [i for i in allowed_ids(guide) if rest.startswith(TOKENIZER.token_text(i) or "?")]
        assert fitting, f"cut before {rest}"
        ids.append(max(fitting, key=lambda i: len(TOKENIZER.token_text(i))))
        guide.advance(ids[-1:])
        rest = call[len(TOKENIZER.decode(ids, skip_special_tokens=False)) :]
        if rest[:1] == "3" and call[: -len(rest)].endswith(": "):
            break
    digits = 0
    while three := [i for i in allowed_ids(guide) if TOKENIZER.token_text(i) == "3"]:
        guide.advance(three)
        digits += 1
    assert 15 < digits <= 20
