"""Calls with one or two wrong characters: the reported part is JSON, and the rest stays content."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.parse.events import Arguments, CallEnd, CallStart, Content, Event, ParsedMessage
from kvasir.parse.format import Format, grammar_parts
from tests.examples import examples
from tests.parse.writing import CALLING, HEADERS, Calls, format_of, parsed, schemas, written

# No word is part of another one, or of what formats write themselves.
WORDS = ["yggdrasil", "ratatoskr", "huginn", "muninn", "sleipnir", "fenrir", "jormungandr", "gullinbursti"]
CALLS: list[Calls] = [
    [("look_up", {"yggdrasil": "ratatoskr", "huginn": 42})],
    [("look_up", {"sleipnir": ["muninn", True, None], "fenrir": {"jormungandr": -1.5e3}})],
    [("look_up", {"huginn": "muninn"}), ("fetch", {"yggdrasil": "ratatoskr", "gullinbursti": []})],
    [("look_up", {}), ("fetch", {"fenrir": "a<b>\"c\"\\d\n'e' {f} [g]"})],
]
PIECES = st.sampled_from([*"{}[]()\"'`,:;=<>|/\\ \nxN0-", "NaN", '","', "}}", "None", ": ", "</", "\n\n"])
EDITS = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from((0, 0, 1, 1, 2, 5)), PIECES | st.just("")), min_size=1, max_size=3
)


def mutated(text: str, edits: list[tuple[float, int, str]]) -> str:
    """With the given edits: the place as a part of the whole, how many characters are left out, what is put there."""
    for where, gone, new in edits:
        at = int(where * len(text))
        text = text[:at] + new + text[at + gone :]
    return text


@pytest.mark.few(24)
@pytest.mark.parametrize("name", CALLING)
@examples(25)
@given(calls=st.sampled_from(CALLS), edits=EDITS)
def test_mutated_calls_are_events_or_content(name, calls, edits):
    format = Format(format_of(name).calls)
    text = mutated(written(format, calls), edits)
    events = parsed(format, text, tools=schemas(calls))
    message = ParsedMessage.of(events)
    if not message.calls and name not in HEADERS:  # which are no content
        assert (message.content, message.reasoning) == (text, "")
    recorded = message.content + "".join(call.name + call.arguments for call in message.calls)
    assert [word for word in WORDS if word in text and word not in recorded] == []
    check_contents(name, text, events)
    for i, call in enumerate(message.calls):
        assert is_json(call.arguments) or (begins_json(call.arguments) and ends_in(text, events, i)), call


def check_contents(name: str, text: str, events: list[Event]) -> None:
    """What comes before the first call begins the text, what comes after the last one ends it."""
    if name in HEADERS or not any(isinstance(event, CallStart) for event in events):
        return
    if isinstance(events[0], Content):
        assert text.startswith(events[0].text)
    if isinstance(events[-1], Content):
        assert text.endswith(events[-1].text)


def ends_in(text: str, events: list[Event], index: int) -> bool:
    """Whether a call breaks off: where all text does, or where content follows, or the next call."""
    place = events.index(CallEnd(index))
    return place + 1 == len(events) or isinstance(events[place + 1], Content | CallStart)


def is_json(text: str) -> bool:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict)
    except ValueError:
        return False


def begins_json(text: str) -> bool:
    """Whether something can follow that makes it JSON."""
    closing = []
    for character in re.sub(r'"(\\.|[^"\\])*("|\\?\Z)', "", text, flags=re.DOTALL):
        if character in "{[":
            closing.append("}" if character == "{" else "]")
        elif character in "}]" and (not closing or closing.pop() != character):
            return False
    tails = ["", '"', '"":0', ":0", '":0', "0", '\\"', '\\":0', "".join(reversed(closing)) and "null"]
    tails += [word[i:] for word in ("true", "false", "null") for i in range(1, 5)]
    tails += ["0" * k + end for k in range(1, 5) for end in ('"', '":0')]
    return any(is_json(text + tail + "".join(reversed(closing))) for tail in tails)


@pytest.mark.parametrize(
    ("name", "text", "recorded", "content"),
    [
        ("hermes", '<tool_call>{"name": "f", "args": {"a": 1}}</tool_call>', '{"a": 1}', ""),
        ("hermes", '<tool_call>{"args": {"a": 1}, "name": "f"}</tool_call>', '{"a": 1}', ""),
        ("hermes", '<tool_call>{"name": "f", "a": 1}</tool_call>', None, None),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', '{"a": ', "NaN}}</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call>', "{", "a: 1}}</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {a: 1}, "name": "f"}</tool_call>', None, None),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1]}}', '{"a": 1', "]}}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a" 1}}', '{"a" ', "1}}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}', '{"a": ', "01}}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1,], "b": True,}}', '{"a": [1], "b": true}', ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "b": 2}</tool_call>', '{"a": 1}',
         ', "b": 2}</tool_call>'),
        ("mistral_args", '[TOOL_CALLS]f[ARGS]{"a": -Infinity}', '{"a": ', "-Infinity}"),
        ("lfm2", "<|tool_call_start|>[f(a=nan)]<|tool_call_end|>", '{"a": ', "nan)]<|tool_call_end|>"),
        ("gemma4", "<|tool_call>call:f{a:nan}<tool_call|>", '{"a": ', "nan}<tool_call|>"),
        ("harmony", ' to=functions.f<|message|>{"a": NaN}<|call|>', '{"a": ', "NaN}"),
    ],
)  # fmt: skip
def test_invalid_json_ends_the_call(name, text, recorded, content):
    message = ParsedMessage.of(parsed(Format(format_of(name).calls), text, tools={"f": {}}))
    assert [call.arguments for call in message.calls] == ([] if recorded is None else [recorded])
    assert message.content == (text if content is None else content)


def test_an_interrupted_call_keeps_its_arguments():
    text = '[TOOL_CALLS]f[ARGS]{"a": "b"[TOOL_CALLS]g[ARGS]{"c": []}'
    message = ParsedMessage.of(parsed(format_of("mistral_args"), text, tools={"f": {}, "g": {}}))
    assert [(call.name, call.arguments) for call in message.calls] == [("f", '{"a": "b"'), ("g", '{"c": []}')]
    assert message.content == ""


def test_a_python_list_between_marks_is_a_list():
    types = {"a": {"type": "array"}, "b": {"type": "object"}, "d": {"type": "string"}}
    reply = {"a": "['x', True, None]", "b": "{'k': (1, 2.0)}", "c": "['x', \"y\"]", "d": "['x']", "e": "[see 'x']"}
    marked = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in reply.items())
    events = parsed(format_of("qwen3_coder"), f"<function=f>\n{marked}</function>", tools={"f": {"properties": types}})
    assert json.loads("".join(event.text for event in events if isinstance(event, Arguments))) == {
        "a": ["x", True, None], "b": {"k": [1, 2.0]}, "c": ["x", "y"], "d": "['x']", "e": "[see 'x']",
    }  # fmt: skip


@pytest.mark.few(20)
@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize("calls", [pytest.param(CALLS[0], marks=pytest.mark.slow), CALLS[2]], ids=len)
def test_an_end_mark_that_is_cut_is_no_content(name, calls):
    format = Format(format_of(name).calls)
    whole, parts = written(format, calls), grammar_parts(format, calls[-1][0], len(calls) - 1)
    recorded = ParsedMessage.of(parsed(format, whole, tools=schemas(calls))).calls
    for cut in range(len(whole) - len(parts.end + parts.close), len(whole)):
        for sizes in ([], [1] * cut):
            message = ParsedMessage.of(parsed(format, whole[:cut], sizes, tools=schemas(calls)))
            assert message.content == "", whole[:cut]
            assert [call.name for call in message.calls] == [call.name for call in recorded]
            last = message.calls[-1].arguments  # its brace may be a part of the mark
            assert recorded[-1].arguments in (last, last + "}")


@pytest.mark.parametrize(("name", "text", "recorded"), [
    ("pythonic", "[look_up(a=4", '{"a": 4'),
    ("pythonic", "[look_up(a=Tr", '{"a": tr'),
    ("hermes", '<tool_call>{"name": "look_up", "arguments": {"a": 4', '{"a": 4'),
    ("mistral", '[TOOL_CALLS][{"name": "look_up", "arguments": {"a": 4}},', '{"a": 4}'),
])  # fmt: skip
def test_arguments_that_are_cut_are_no_content(name, text, recorded):
    message = ParsedMessage.of(parsed(format_of(name), text, tools={"look_up": {}}))
    assert (message.content, [call.arguments for call in message.calls]) == ("", [recorded])


@pytest.mark.parametrize("number", ["1.5", "-.5", "+1.e5", "1_000", "-2.5e+10", "0"])
def test_a_number_that_is_cut_is_the_beginning_of_the_whole(number):
    def arguments(text: str) -> str:
        message = ParsedMessage.of(parsed(format_of("pythonic"), text, tools={"look_up": {}}))
        assert message.content == ""
        return message.calls[0].arguments

    whole = arguments(f"[look_up(a={number})]")
    assert json.loads(whole) == {"a": float(number)}
    for size in range(len(number)):
        assert whole.startswith(arguments(f"[look_up(a={number[:size]}")), number[:size]
