"""Guides: what may come next, and that forced text is the text one would have sampled."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.errors import UnsupportedModel
from kvasir.guided import sources
from kvasir.guided.guide import CACHED_GRAMMARS, GrammarGuides, GuideError, make_tokenizer
from tests.examples import examples
from tests.guided.walk import BROKEN, SPECIALS, TOKENIZER, VOCABULARY, allowed_ids, assert_equal, make_guides, walk

GUIDES = make_guides()
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "temperature_in_celsius": {"type": "integer", "minimum": -50, "maximum": 50},
        "tags": {"type": "array", "items": {"enum": ["warm", "warmer", "cold"]}, "maxItems": 3},
        "open": {"type": "boolean"},
    },
    "required": ["name", "temperature_in_celsius", "tags"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": sources.json_schema(SCHEMA),
    "object": sources.json_object(),
    "regex": sources.regex(r"[0-9]{3}-(cat|category)x?"),
    "choice": sources.choice(["yes", "yesterday", "no \"thanks\""]),
    "tags": sources.structural_tags(
        [sources.Tag(f'<tool_call>\n{{"name": "{n}", "arguments": ', SCHEMA, "}\n</tool_call>") for n in ("get", "go")],
        ["<tool_call>"],
        SPECIALS,
        at_least_one=True,
        at_most_one=True,
    ),
}  # fmt: skip


def guide(name: str):
    return GUIDES.take(GUIDES.begin(GRAMMARS[name]))


@examples(30)
@given(st.sampled_from(sorted(GRAMMARS)), st.integers(0, 2**32))
def test_jumping_gives_the_ids_of_sampling_under_the_mask(name, seed):
    assert walk(guide(name), seed) == walk(guide(name), seed, jump=True)


@examples(30)
@given(st.sampled_from(sorted(GRAMMARS)), st.integers(0, 2**32), st.integers(0, 200))
def test_forced_ids_are_the_only_allowed_ones(name, seed, steps):
    at = guide(name)
    walk(at, seed, limit=steps)
    if not at.done and (forced := at.forced()):
        for token in forced:
            assert allowed_ids(at) == [token]
            at.advance([token])


@examples(20)
@given(st.sampled_from(sorted(GRAMMARS)), st.integers(0, 2**32), st.integers(0, 60))
def test_a_guide_rebuilt_from_the_ids_has_the_same_state(name, seed, steps):
    old = guide(name)
    ids = walk(old, seed, limit=steps)
    if ids is not None or old.done:
        return
    old = guide(name)
    ids = []
    for _ in range(steps):
        token = (old.forced() or allowed_ids(old))[0]
        if token in TOKENIZER.eos_ids:
            break
        ids.append(token)
        old.advance([token])
        if old.done:
            break
    walk(old.copy(), seed, limit=20)  # moves the copy alone
    assert_equal(GUIDES.take(GUIDES.begin(GRAMMARS[name]), ids), old, seed)


@examples(30)
@given(st.integers(0, 2**32))
def test_answers_are_of_the_schema(seed):
    ids = walk(guide("schema"), seed)
    if ids is None:
        return
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    value = json.loads(text)
    assert re.match(r'\{"name": ".*", "temperature_in_celsius": -?\d+, "tags": \[', text), "spelt as json.dumps does"
    assert -50 <= value["temperature_in_celsius"] <= 50 and len(value["name"]) <= 12
    assert list(value) == [k for k in SCHEMA["properties"] if k in value]
    assert set(value["tags"]) <= {"warm", "warmer", "cold"} and len(value["tags"]) <= 3


@pytest.mark.parametrize("seed", range(8))
def test_answers_match_the_pattern_or_are_one_of_the_choices(seed):
    assert re.fullmatch(r"[0-9]{3}-(cat|category)x?", TOKENIZER.decode(walk(guide("regex"), seed) or []))
    assert TOKENIZER.decode(walk(guide("choice"), seed) or []) in {"yes", "yesterday", 'no "thanks"'}


@pytest.mark.parametrize("seed", range(4))
def test_free_text_turns_into_a_call_at_its_trigger_and_only_there(seed):
    first = tuple(TOKENIZER.encode("<think>hm</think>I <look> it up.<tool_call>", add_special_tokens=False))
    ids = walk(guide("tags"), seed, first=first)
    if ids is None:
        return
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    found = re.fullmatch(r"<think>hm</think>I <look> it up\.<tool_call>\n(.*)\n</tool_call>", text)
    assert found, text
    call = json.loads(found[1])
    assert call["name"] in {"get", "go"} and set(call["arguments"]) <= set(SCHEMA["properties"])


def test_a_trigger_of_ordinary_tokens_is_found_too():
    tags = [sources.Tag(f"<function={n}>", {"type": "integer"}, "</function>") for n in ("get", "go")]
    text = sources.structural_tags(tags, ["<function="], SPECIALS)
    first = TOKENIZER.encode("a <functional> one: <function=g", add_special_tokens=False)
    at = GUIDES.take(GUIDES.begin(text), first)
    texts = {TOKENIZER.token_text(i) for i in allowed_ids(at)}
    assert texts and all(t.startswith(("e", "o")) for t in texts)


def test_an_id_that_may_not_come_is_an_error_and_nothing_else():
    at = guide("regex")
    with pytest.raises(GuideError, match="followed"):
        at.advance(TOKENIZER.encode("x", add_special_tokens=False))
    with pytest.raises(GuideError):
        at.allowed()


def test_a_grammar_that_does_not_compile_is_an_error_each_time():
    for _ in range(2):
        with pytest.raises(GuideError, match="unevaluatedItems"):
            GUIDES.take(GUIDES.begin(sources.json_schema({"type": "array", "unevaluatedItems": False})))


def test_the_cache_is_bounded_and_answers_do_not_share_a_state():
    guides = make_guides()
    first, second, *rules = [sources.choice([str(i)]) for i in range(CACHED_GRAMMARS + 1)]
    oldest, *begun = [guides.begin(rule) for rule in (second, first, *rules[:-1])]
    assert guides.begin(second) is oldest
    begun.append(guides.begin(rules[-1]))
    assert guides.begin(second) is oldest, "the one used longest ago goes first"
    assert all(guides.begin(rule) is compiled for rule, compiled in zip(rules, begun[1:], strict=True))
    assert guides.begin(first) is not begun[0], "more grammars are cached"
    a, b = (guides.take(guides.begin(GRAMMARS["choice"])) for _ in range(2))
    before = b.allowed()
    a.advance(TOKENIZER.encode("n", add_special_tokens=False))
    assert b.allowed() == before
    guides.close()


def test_a_vocabulary_that_the_library_cannot_read_is_an_error():
    with pytest.raises(UnsupportedModel, match="grammars"):
        make_tokenizer(BROKEN)
    guides = GrammarGuides(lambda: BROKEN)
    with pytest.raises(UnsupportedModel):
        guides.take(guides.begin(GRAMMARS["choice"]))


def test_warming_loads_the_vocabulary_once():
    loads = []
    guides = GrammarGuides(lambda: loads.append(1) or VOCABULARY)
    guides.warm()
    guides.take(guides.begin(GRAMMARS["choice"]))
    assert loads == [1]
    broken = GrammarGuides(lambda: BROKEN)
    broken.warm()
    broken.close()
