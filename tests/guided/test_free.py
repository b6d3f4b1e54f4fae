"""Free text in which a call may begin: it is free to the last byte, and a call that has begun is well-formed."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvasir.guided.guide import GuideError
from kvasir.guided.reasoning_tracker import ReasoningTracker
from kvasir.guided.rule import Free, ReasoningMarks, Rule
from kvasir.guided.tools import Function, free_text, tool_grammar
from kvasir.parse.events import ParsedMessage
from kvasir.parse.format import Format, Style, grammar_parts
from kvasir.parse.parser import Parser
from kvasir.parse.table import CALLS, THINKING
from tests.examples import examples
from tests.guided.test_tools import FUNCTIONS, TOOLS, check
from tests.guided.walk import SPECIALS, TOKENIZER, VOCAB, allowed_ids, assert_equal, ids_of, make_guides, walk
from tests.parse.writing import format_of, one_of_each_shape, written

GUIDES = make_guides()
FORMATS = {calls.name: calls for calls in CALLS if calls.enforced and calls.style is not Style.NONE}
THINK = next(t for t in THINKING if t.name == "think")
EOS = TOKENIZER.eos_ids[0]


def make_rule(format: Format, opened: bool = False, budget: int | None = None, parallel: bool = True) -> Rule:
    grammar = tool_grammar(format, FUNCTIONS, SPECIALS, parallel=parallel, opened=opened)
    thinking = format.thinking
    anywhere = format.calls.style is Style.CHANNELS
    reasoning = ReasoningMarks(thinking.start, thinking.end, opened, anywhere) if thinking else None
    return Rule(grammar, free_text(format), reasoning, budget)


def make_guide(name: str, thinking=None, **options):
    return GUIDES.take(GUIDES.begin(make_rule(Format(FORMATS[name], thinking), **options).text()))


def is_allowed(guide, token: int) -> bool:
    mask = guide.allowed()
    return mask is None or bool(np.frombuffer(mask, np.int32)[token >> 5] >> (token & 31) & 1)


def read(text: str, format: Format, opened: bool = False) -> ParsedMessage:
    parser = Parser(format, TOOLS, calls=True, opened=opened)
    return ParsedMessage.of([*parser.push(text), *parser.finish()])


@given(st.builds(
    Rule, st.text(), st.none() | st.builds(Free, st.tuples(st.text()), st.tuples(st.text()), st.text()),
    st.none() | st.builds(ReasoningMarks, st.text(), st.text(), st.booleans(), st.booleans()), st.none() |
    st.integers(0),
))  # fmt: skip
def test_a_rule_survives_its_text_form(rule):
    if rule.grammar.startswith("%kvasir"):
        return
    assert Rule.of(rule.text()) == rule
    assert Rule(rule.grammar).text() == rule.grammar


@pytest.mark.few(12)
@pytest.mark.parametrize("name", one_of_each_shape(FORMATS))
@examples(8)
@given(seed=st.integers(0, 2**32))
def test_text_without_a_call_is_free_whatever_its_bytes(name, seed):
    """Ids by chance, among them halves of characters and ids that no token has, until one would complete a mark."""
    guide, rng, text = make_guide(name), random.Random(seed), b"."
    guide.advance(ids_of("."))
    for _ in range(60):
        token = rng.randrange(VOCAB)
        data = TOKENIZER.token_bytes(token)
        if any(mark.encode() in text + data for mark in FORMATS[name].begins):
            break
        assert is_allowed(guide, token) and guide.forced() == [] and not guide.done
        guide.advance([token])
        text += data


@pytest.mark.few(10)
@pytest.mark.parametrize("name", one_of_each_shape(FORMATS))
@examples(5)
@given(seed=st.integers(0, 2**32), before=st.sampled_from(["", "Well, I <look>.\n", "é", "<", "[", "{", "Action"]))
def test_a_call_that_begins_in_free_text_is_well_formed(name, seed, before):
    format = Format(FORMATS[name])
    mark = random.Random(seed).choice(format.calls.begins)
    guide = make_guide(name)
    ids = walk(guide, seed, first=tuple(ids_of(before + mark)), limit=250)
    if ids is not None:
        check(read(TOKENIZER.decode(ids, skip_special_tokens=False), format))


KEYS = ["name", "tool_name", "arguments", "parameters", "id", "type", "function", "n\\u0061me", "x"]
VALUES = [
    '"look_up"',
    '"end"',
    '"function"',
    '"look\\u005fup"',
    '"a\\"b"',
    '{"number": "bad"}',
    '{"mode": 3}',
    "null",
    "[1]",
    "12",
]
BLANKS = st.sampled_from(["", "", " ", "\n", " " * 17, "\xa0", "\x1c", "\x85"])


@st.composite
def near_calls(draw: st.DrawFn, name: str) -> str:
    """Calls and malformed calls, in any order, with arguments that are never valid for their tool."""
    format, style = format_of(name), FORMATS[name].style
    members = st.tuples(st.sampled_from(KEYS), BLANKS, st.sampled_from(VALUES)).map(lambda m: f'"{m[0]}":{m[1]}{m[2]}')
    parts = st.lists(st.one_of(members, BLANKS, members.map(lambda text: text + ", ")), max_size=6).map("".join)
    whole = parts.map(lambda text: "{" + text + "}")
    if style is Style.PYTHON:
        whole = st.sampled_from(["look_up(number='x')", "look_up()", "end(x=1)", "look_up (1)"])
    elif style not in (Style.OBJECTS, Style.PYTHON):
        whole |= st.sampled_from([("look_up", {"number": "x", "mode": 1}), ("end", {"x": [1]}), ("look_up", {})]).map(
            lambda call: written(format, [call])
        )
    marks = [*FORMATS[name].begins, *FORMATS[name].ends, "[", "]", ", ", "; "]
    marks += [m for m in (format.thinking.start, format.thinking.end, *format.thinking.answer) if m]
    return "".join(draw(st.lists(BLANKS | whole | whole | st.sampled_from(marks), max_size=6)))


@pytest.mark.few(10)
@pytest.mark.parametrize("name", one_of_each_shape(FORMATS))
@examples(20)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_parsed_calls_follow_the_schema_of_their_tool(name, data, seed):
    """As far as an answer may go its own way, it does; then by chance."""
    format = format_of(name)
    text = data.draw(near_calls(name))
    guide = GUIDES.take(GUIDES.begin(make_rule(format).text()))
    ids = walk(guide, seed, first=tuple(ids_of(text)), limit=len(ids_of(text)) + 60)
    if ids is not None:
        check(read(TOKENIZER.decode(ids, skip_special_tokens=False), format))


@pytest.mark.few(20)
@pytest.mark.parametrize("name", FORMATS)
def test_tokens_that_complete_a_mark_without_a_call_are_forbidden(name):
    for mark in FORMATS[name].begins:
        for cut in range(0, len(mark), 3):
            before = ids_of("so " + mark[:cut])
            guide = make_guide(name)
            guide.advance(before)
            text = b"".join(map(TOKENIZER.token_bytes, before))
            if guide.in_call or guide.allowed() is None:
                continue
            for token in set(range(VOCAB)) - set(allowed_ids(guide)):
                assert any(m.encode() in text + TOKENIZER.token_bytes(token) for m in FORMATS[name].begins)


@pytest.mark.parametrize("name", ["hermes", "functionary", "kimi_k2", "qwen3_coder"])
def test_text_after_a_call_is_free_and_partial_end_marks_are_text(name):
    format = Format(FORMATS[name])
    guide, rng = make_guide(name), random.Random(7)
    for _ in range(3):
        guide.advance(ids_of("And then "))
        assert guide.allowed() is None and is_allowed(guide, EOS)
        guide.advance([EOS])
        guide.advance(ids_of(format.calls.begins[0]))
        assert guide.in_call and not guide.done
        for _ in range(400):
            if not guide.in_call:
                break
            allowed = allowed_ids(guide)
            ends = [i for i in allowed if TOKENIZER.token_text(i) in {'"', "}", "]", "<", "</tool_call>"}]
            token = rng.choice(ends if ends and rng.random() < 0.5 else allowed)
            assert token != EOS
            guide.advance([token])
        assert not guide.in_call, "the call came to its end"


@pytest.mark.parametrize("name", [n for n, calls in FORMATS.items() if calls.bare])
def test_text_that_only_begins_like_an_unmarked_call_is_free(name):
    objects = FORMATS[name].style is Style.OBJECTS
    reply = '{"title": "Alice", "name": "Bob"}' if objects else "[1, 2, look_up]"
    guide = make_guide(name)
    for token in ids_of(" " + reply + "\nAnd that is all."):
        assert is_allowed(guide, token)
        guide.advance([token])
    assert is_allowed(guide, EOS)
    call = grammar_parts(Format(FORMATS[name]), "look_up").begin + ('{"x' if objects else "x")
    with pytest.raises(GuideError, match="followed"):
        make_guide(name).advance(ids_of(call))
    assert is_allowed(make_guide(name), EOS), "an answer may be empty"


@pytest.mark.parametrize("name", [n for n, c in FORMATS.items() if c.bare and c.style is Style.OBJECTS])
@pytest.mark.parametrize("text", ['{"name":"look_up"}', '{"name":"look_up", "parameters": {"number": "bad"}}'])
def test_a_call_in_another_notation_is_not_plain_text(name, text):
    guide = make_guide(name)
    with pytest.raises(GuideError, match="followed"):
        guide.advance(ids_of(text))


def test_an_unmarked_call_may_state_its_type_first():
    ids = walk(make_guide("llama3"), 3, first=tuple(ids_of('{"type": "function", "name": "look_up"')), limit=200)
    assert ids is not None
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    message = read(text, Format(FORMATS["llama3"]))
    assert text.startswith('{"type": "function", "name": "look_up", "parameters": {') and len(message.calls) >= 1
    check(message)


def test_a_single_call_ends_the_answer():
    guide = make_guide("hermes", parallel=False)
    guide.advance(ids_of('Sure.<tool_call>\n{"name": "end", "arguments": {}}\n</tool_call>'))
    assert guide.done


@pytest.mark.parametrize("opened", [True, False])
def test_a_mark_in_the_reasoning_begins_a_call_only_with_what_belongs_to_it(opened):
    format = Format(FORMATS["hermes"], THINK)
    before = "" if opened else "<think>"
    guide = make_guide("hermes", THINK, opened=opened)
    guide.advance(ids_of(before + "I could say <tool_call> now, or <tool_call>\n{ no"))
    assert not guide.in_call and guide.allowed() is None
    guide.advance(ids_of("</think>Said."))
    assert not guide.in_call
    guide.advance(ids_of("<tool_call>"))
    assert guide.in_call

    guide = make_guide("hermes", THINK, opened=opened)
    reply = before + 'I just do.<tool_call>\n{"name": "'
    ids = walk(guide, 5, first=tuple(ids_of(reply)), limit=300)
    assert ids is not None
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    message = read(text, format, opened)
    assert message.calls and message.reasoning.strip() == "I just do."
    check(message)


@examples(25)
@given(st.sampled_from(["hermes", "llama3", "functionary"]), st.integers(0, 2**32), st.integers(0, 80), st.booleans())
def test_a_guide_rebuilt_from_the_ids_has_the_same_state(name, seed, steps, budget):
    rule = make_rule(Format(FORMATS[name], THINK), budget=5 if budget else None).text()
    rng, ids = random.Random(seed), []
    old = GUIDES.take(GUIDES.begin(rule))
    wanted = ids_of(rng.choice(["<think>a b c d e f g h", FORMATS[name].begins[0], "{", "Hello <function", ""]))
    for _ in range(steps):
        if old.done:
            break
        mask = old.allowed()
        allowed = list(range(VOCAB)) if mask is None else allowed_ids(old)
        token = wanted.pop(0) if wanted and wanted[0] in allowed else rng.choice(allowed)
        assert not (forced := old.forced()) or allowed == forced[:1]
        old.advance([token])
        ids.append(token)
    walk(old.copy(), seed, limit=20)  # moves the copy alone
    assert_equal(GUIDES.take(GUIDES.begin(rule), ids), old, seed)


# -- the budget of reasoning -----------------------------------------------------------------------------


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_reasoning_ends_at_its_budget_and_not_before(opened, budget):
    rule = Rule(reasoning=ReasoningMarks("<think>", "</think>", opened), budget=budget).text()
    guide = GUIDES.take(GUIDES.begin(rule))
    end = ids_of("</think>")
    if not opened:
        assert guide.allowed() is None
        guide.advance(ids_of("\n<think>"))
    for token in ids_of(" a b c d e f g h i")[:budget]:
        assert guide.allowed() is None and guide.forced() == []
        guide.copy().advance([token])  # counts for the copy alone
        guide.advance([token])
    assert allowed_ids(guide) == end[:1] and guide.forced() == end
    with pytest.raises(GuideError, match="end"):
        GUIDES.take(GUIDES.begin(rule), [*([] if opened else ids_of("<think>")), *ids_of(" a b c d e f g h i j k")])
    guide.advance(end)
    assert guide.allowed() is None and guide.forced() == [] and not guide.done
    guide.advance(ids_of("The answer.<think> a b c d e f g h i j"))
    assert guide.allowed() is None, "behind content there is no reasoning"


def test_reasoning_that_begins_again_has_the_rest_of_its_budget():
    rule = Rule(reasoning=ReasoningMarks("<think>", "</think>"), budget=4).text()
    pieces = ids_of("<think>"), ids_of(" a b")[:2], ids_of("</think>\n<think>"), ids_of(" c d")[:2]
    guide = GUIDES.take(GUIDES.begin(rule), [i for piece in pieces for i in piece])
    assert guide.forced() == ids_of("</think>")


def test_marks_of_ordinary_tokens_are_counted_and_forced_too():
    reasoning = ReasoningMarks("Here is my thought process:", "Here is my response:")
    guide = GUIDES.take(GUIDES.begin(Rule(reasoning=reasoning, budget=3).text()))
    guide.advance(ids_of("Here is my thought process:"))
    guide.advance(ids_of(" one two three four")[:3])
    forced = guide.forced()
    assert TOKENIZER.decode(forced) == reasoning.end
    guide.advance(forced)
    assert guide.allowed() is None


def test_the_budget_bounds_what_comes_before_a_required_call():
    format = Format(FORMATS["hermes"], THINK)
    grammar = tool_grammar(format, FUNCTIONS, SPECIALS, required=True, opened=True)
    rule = Rule(grammar, None, ReasoningMarks("<think>", "</think>", True), 6)
    ids = walk(GUIDES.take(GUIDES.begin(rule.text())), 3, first=tuple(ids_of(" x y z x y z x y z")), limit=400)
    assert ids is not None
    message = read(TOKENIZER.decode(ids, skip_special_tokens=False), format, True)
    assert message.calls and len(ids_of(message.reasoning)) <= 7
    check(message)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", " ", "a", "\n", "<thi", "nk>", "</", "think", " " * 16, "\xa0"])),
    st.booleans(),
)
@example(["</think>", "<think>"], False)
@example(["\n</think>", " ", "<think>", "a", "</think>", "b"], False)
def test_thought_is_what_the_parser_reads_as_reasoning(pieces, opened):
    thought, text = ReasoningTracker(ReasoningMarks("<think>", "</think>", opened)), "".join(pieces)
    for piece in pieces:
        thought.feed(piece.encode())
    format = Format(next(c for c in CALLS if c.style is Style.NONE), THINK)
    reply, more = (read(t, format, opened) for t in (text, text + "#"))
    assert thought.inside == (len(more.reasoning) > len(reply.reasoning))


def test_loose_functions_are_called_with_any_object():
    format = Format(FORMATS["hermes"])
    grammar = tool_grammar(format, [Function("f", {})], SPECIALS)
    guide = GUIDES.take(GUIDES.begin(Rule(grammar, free_text(format)).text()))
    ids = walk(guide, 1, first=tuple(ids_of("<tool_call>")), limit=300)
    assert ids is None or isinstance(json.loads(TOKENIZER.decode(ids).split("\n")[1])["arguments"], dict)
