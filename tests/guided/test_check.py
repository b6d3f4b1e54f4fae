"""Grammars of strangers: what cannot be enforced is named, and what hangs or crashes does so alone."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.errors import InvalidRequest
from kvasir.guided import check, sources
from kvasir.guided.check import MAX_CHARS, GrammarCheck
from kvasir.guided.grammar import GrammarError
from tests.guided.walk import BROKEN, TOKENIZER, VOCABULARY, make_guides, walk

GUIDES = make_guides()
LENGTHS = r"^$|(^(?:\S+\s+){0,99}\S+$)"
SOUND = {
    f"{least} to {most}": sources.json_schema({"pattern": LENGTHS, "type": "string"} | least | most)
    for least in ({}, {"minLength": 1})
    for most in ({}, {"maxLength": 100}, {"maxLength": 500})
} | {
    "forty of ninety-nine": sources.regex("a{99}" * 40),
    "forty of up to ninety-nine": sources.regex("a{0,99}" * 40),
}


@pytest.fixture(scope="module")
def checker():
    checker = GrammarCheck(lambda: VOCABULARY)
    yield checker
    checker.close()


ATOMS = st.sampled_from(["a", "b", "[a-z]", ".", r"\d", r"\s", r"\S", "ab", "[^x]", "a|b", "(?:ab|a)", "é"])
TIMES = st.sampled_from(["", "?", "*", "+", "{99}", "{0,99}", "{1,99}", "{10,}", "{0,20}", "{2,5}"])
REPEATED = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(st.builds("(?:{}){}".format, inner, TIMES), min_size=1, max_size=4).map("".join)
        | st.builds(lambda one, times: f"(?:{one}){times}" * 40, ATOMS, TIMES)
    ),
    max_leaves=8,
)
LENGTH = st.none() | st.sampled_from([0, 1, 3, 10, 50, 100, 500])


@pytest.mark.slow
@settings(max_examples=60)
@given(REPEATED, LENGTH, LENGTH, st.booleans(), st.integers(0, 2**32))
def test_a_pattern_is_refused_or_can_be_followed(checker, pattern, least, most, whole, seed):
    reply = {"minLength": least, "maxLength": most, "pattern": f"^(?:{pattern})$" if whole else pattern}
    schema = {"type": "string", **{key: value for key, value in reply.items() if value is not None}}
    try:
        grammar = checker.check(sources.json_schema(schema))
    except InvalidRequest:
        return
    try:
        ids = walk(GUIDES.take(GUIDES.begin(grammar)), seed)
    except GrammarError as error:  # which ends this request alone, as a bad one
        assert "limits" in str(error)
        return
    with suppress(jsonschema_rs.ValidationError):  # the judge does not read long patterns
        judge = jsonschema_rs.validator_for(schema)
        assert ids is None or judge.is_valid(json.loads(TOKENIZER.decode(ids)))


BAD = {
    "a keyword that is not enforced": (
        sources.json_schema({"type": "array", "unevaluatedItems": False}),
        "unevaluatedItems",
    ),
    "an unknown type": (sources.json_schema({"type": "banana"}), "banana"),
    "a reference to nothing": (sources.json_schema({"$ref": "#/nope"}), "does not exist"),
    "a reference to elsewhere": (sources.json_schema({"$ref": "http://example.org/schema"}), "example.org"),
    "a pattern with lookahead": (sources.regex("a(?=b)"), "look-around"),
    "an open bracket": (sources.regex("(a"), "unclosed group"),
    "a rule that never ends": ("start: start", "no token"),
    "an unknown special token": ("start: <|nothing|>", "unknown special token"),
    "a schema without end": (
        sources.json_schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        "no token",
    ),
    "a list of no grammars": ('{"grammars": []}', "empty"),
    "more than it may have": ("x" * (MAX_CHARS + 1), f"{MAX_CHARS + 1} characters"),
    "a lone surrogate": (sources.choice(["a\ud800"]), "surrogate|hex escape"),
}

# What compiles, and fails where answers follow it; on a slow machine some of it takes too long before.
SLOW = "|more than 5 seconds"
STRANDED = {
    "a million characters at once": (sources.regex("a{1000000}"), "limits" + SLOW),
    "a million characters of a string": (
        sources.json_schema({"pattern": "^a{1000000}$", "type": "string"}),
        "limits" + SLOW,
    ),
    "repeats of repeats": (sources.regex("(((a{99}){99}){99})"), "limits" + SLOW),
    "an end that cannot be reached": ("start: /[a-z]{3}/ end\nend: end", "no token"),
}


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] if name == "repeats of repeats" else [])
        for name, case in STRANDED.items()
    ],
)
def test_a_grammar_that_answers_could_not_follow_is_refused(checker, grammar, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        checker.check(grammar, param="structured_outputs")
    assert caught.value.param == "structured_outputs" and "verbose" not in str(caught.value)
    assert checker.check(GOOD) == GOOD


@settings(max_examples=10)
@given(st.sampled_from(sorted(SOUND)), st.integers(0, 2**32))
def test_an_accepted_schema_can_be_followed(checker, name, seed):
    assert checker.check(SOUND[name]) == SOUND[name]
    walk(GUIDES.take(GUIDES.begin(SOUND[name])), seed, jump=True)


@pytest.mark.parametrize(("grammar", "message"), BAD.values(), ids=BAD.keys())
def test_schemas_that_cannot_be_enforced_are_refused_by_name(checker, grammar, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        checker.check(grammar, param="response_format")
    assert caught.value.param == "response_format" and len(str(caught.value)) < 1200
    assert "Parser:" not in str(caught.value), "no inside of the library"
    assert checker.check(GOOD) == GOOD


GOOD = sources.json_object()


def test_lenient_ignores_what_cannot_be_enforced(checker):
    loose = sources.json_schema({"type": "array", "uniqueItems": True}, lenient=True)
    assert checker.check(loose) == loose


def test_gbnf_becomes_lark(checker):
    lark = checker.check('root ::= "yes" | "no" [0-9]+\n', convert=True)
    assert "start:" in lark and "::=" not in lark
    with pytest.raises(InvalidRequest, match=r"Lark.*GBNF"):
        checker.check("root ::= (", convert=True)
    with pytest.raises(InvalidRequest):
        checker.check("(" * 100_000, convert=True)


def test_a_worker_that_dies_is_replaced(checker):
    checker.check(GOOD)
    checker.sandbox.idle[-1].process.kill()
    checker.sandbox.idle[-1].process.wait()
    assert checker.check(sources.regex("a+")) == sources.regex("a+")


def test_a_slow_grammar_does_not_hold_up_a_fast_one():
    checker = GrammarCheck(lambda: VOCABULARY)
    checker.warm()
    (busy,) = checker.sandbox.idle
    busy.process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(checker.check, sources.regex("b+"))
        while checker.sandbox.idle:  # the slow one has not taken it yet
            time.sleep(0.001)
        assert checker.check(GOOD) == GOOD and not slow.done()
        busy.process.send_signal(signal.SIGCONT)
        assert slow.result() == sources.regex("b+")
    assert len(checker.sandbox.idle) == 2
    checker.close()
    assert busy.process.poll() is not None


def test_a_checked_grammar_is_not_checked_again(checker):
    checker.check(GOOD)
    checker.close()
    assert checker.check(GOOD) == GOOD and not checker.sandbox.idle


def test_the_number_of_remembered_grammars_is_bounded(checker, monkeypatch):
    monkeypatch.setattr(check, "REMEMBERED", 2)
    first, *others = [sources.regex(letter) for letter in "xyz"]
    for grammar in (first, *others):
        checker.check(grammar)
    checker.close()
    assert [checker.check(grammar) for grammar in others] == others and not checker.sandbox.idle
    assert checker.check(first) == first and checker.sandbox.idle


def test_a_vocabulary_that_does_not_support_grammars_is_refused():
    broken = GrammarCheck(lambda: BROKEN)
    with pytest.raises(InvalidRequest, match=r"grammars.*2048 tokens"):
        broken.check(GOOD)


def test_texts_that_make_no_grammar():
    for wrong in ([], ["a", ""]):
        with pytest.raises(InvalidRequest, match="empty choice"):
            sources.choice(wrong)
    with pytest.raises(InvalidRequest, match="allows nothing"):
        sources.json_schema(False)
    with pytest.raises(InvalidRequest, match="no trigger"):
        sources.structural_tags([sources.Tag("<a>", {}, "")], ["<b>"])
    with pytest.raises(InvalidRequest, match="no tags"):
        sources.structural_tags([], ["<b>"])
