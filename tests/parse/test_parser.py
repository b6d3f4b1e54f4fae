"""The parser's promises: nothing depends on how the text was cut, nothing is lost, calls come back as written."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvasir.parse.events import Arguments, Call, CallEnd, CallStart, Content, ParsedMessage, Reasoning
from kvasir.parse.format import Format, Style
from kvasir.parse.parser import Parser
from kvasir.parse.table import choose
from kvasir.parse.tape import MAX_HELD
from tests.examples import examples
from tests.parse.writing import (
    CALL_LISTS,
    CALLING,
    HEADERS,
    NAMES,
    PLAIN,
    SIZES,
    Calls,
    babble,
    format_of,
    one_of_each_shape,
    parsed,
    schemas,
    written,
)

FEW = examples(6)


def calls_of(message: ParsedMessage) -> Calls:
    return [(call.name, json.loads(call.arguments)) for call in message.calls]


# -- calls while they arrive -------------------------------------------------------------------------------


@pytest.mark.few(24)
@pytest.mark.parametrize("name", CALLING)
@FEW
@given(calls=CALL_LISTS, sizes=SIZES)
def test_calls_come_back_as_they_were_written(name, calls, sizes):
    format = format_of(name)
    events = parsed(format, written(format, calls), sizes, tools=schemas(calls))
    message = ParsedMessage.of(events)
    assert calls_of(message) == calls and not message.content and not message.reasoning
    kinds = [type(event) for event in events]
    assert kinds == [CallStart, Arguments, CallEnd] * len(calls)


@pytest.mark.few(12)
@pytest.mark.parametrize("name", one_of_each_shape(name for name in CALLING if name != "harmony"))
@FEW
@given(before=PLAIN, after=PLAIN, calls=CALL_LISTS)
def test_text_around_calls_is_content(name, before, after, calls):
    format = format_of(name)
    before = "" if format.calls.bare else before
    assume(not after.lstrip().startswith((",", ";", "{", "]", "`")))
    before, after = before.strip(), after.rstrip()
    message = ParsedMessage.of(parsed(format, before + written(format, calls) + after, tools=schemas(calls)))
    assert calls_of(message) == calls
    assert message.content == before + after


@pytest.mark.few(12)
@pytest.mark.parametrize(
    "name", one_of_each_shape(name for name in CALLING if name not in ("harmony", "llama3", "pythonic"))
)
@FEW
@given(thoughts=PLAIN, calls=CALL_LISTS, opened=st.booleans())
def test_reasoning_comes_before_calls(name, thoughts, calls, opened):
    format = format_of(name)
    thinking = format.thinking
    assert thinking
    text = ("" if opened else thinking.start) + f"\n{thoughts}\n{thinking.end}\n\n" + written(format, calls)
    message = ParsedMessage.of(parsed(format, text, tools=schemas(calls), opened=opened))
    assert calls_of(message) == calls
    assert (message.reasoning, message.content) == (thoughts.strip(), "")


@pytest.mark.few(12)
@pytest.mark.parametrize("name", one_of_each_shape(CALLING))
@FEW
@given(calls=CALL_LISTS, data=st.data())
def test_a_call_that_breaks_off_ends(name, calls, data):
    """Cut anywhere: what there is of the arguments is a beginning of the whole, and each call has its end."""
    format = format_of(name)
    text = written(format, calls)
    cut = data.draw(st.integers(0, len(text)))
    whole = ParsedMessage.of(parsed(format, text, tools=schemas(calls))).calls
    events = parsed(format, text[:cut], tools=schemas(calls))
    message = ParsedMessage.of(events)
    assert sum(isinstance(e, CallStart) for e in events) == sum(isinstance(e, CallEnd) for e in events)
    for call, complete in zip(message.calls, whole, strict=False):
        assert call.name == complete.name
        if format.calls.parameters is None:
            assert complete.arguments.startswith(call.arguments)
    for call in message.calls[:-1]:
        json.loads(call.arguments)


@pytest.mark.parametrize("name", [name for name in CALLING if format_of(name).calls.parameters is None])
def test_an_end_mark_of_a_string_that_breaks_off_is_no_part_of_it(name):
    format = format_of(name)
    text = written(format, [("f", {"key": "words"})])
    for cut in range(text.index("words"), len(text)):
        message = ParsedMessage.of(parsed(format, text[:cut], tools={"f": {}}))
        assert '{"key": "words"}'.startswith(message.calls[0].arguments), text[:cut]


@pytest.mark.parametrize("name", [name for name in CALLING if format_of(name).calls.parameters is None])
def test_arguments_are_streamed_unchanged(name):
    """In the middle of a long string everything has been emitted except a possible beginning of an escape."""
    format = format_of(name)
    text = written(format, [("f", {"key": "w" * 500})])
    parser = Parser(format, {"f": {}})
    reported = ParsedMessage.of([event for i in range(text.index("ww") + 250) for event in parser.push(text[i])])
    assert reported.calls[0].arguments.count("w") == 250


@pytest.mark.parametrize("name", [name for name in CALLING if format_of(name).calls.parameters])
def test_strings_between_marks_are_unchanged(name):
    format = format_of(name)
    text = written(format, [("f", {"key": "w" * 500})])
    parser = Parser(format, {"f": {"properties": {"key": {"type": "string"}}}})
    reported = ParsedMessage.of([event for i in range(text.index("ww") + 250) for event in parser.push(text[i])])
    assert reported.calls[0].arguments.count("w") == 250


# -- whatever the text -------------------------------------------------------------------------------------


@pytest.mark.few(14)
@pytest.mark.parametrize("name", one_of_each_shape(NAMES))
@examples(20)
@given(data=st.data())
def test_events_do_not_depend_on_how_the_text_was_cut(name, data):
    format = format_of(name)
    text = data.draw(babble(format))
    options = {"opened": data.draw(st.booleans()), "tools": data.draw(st.sampled_from([None, {"f": {}}]))}
    whole = parsed(format, text, **options)
    assert parsed(format, text, [1] * len(text), **options) == whole
    assert parsed(format, text, data.draw(SIZES), **options) == whole


@pytest.mark.few(14)
@pytest.mark.parametrize("name", one_of_each_shape(NAMES))
@examples(20)
@given(data=st.data())
def test_nothing_is_lost(name, data):
    """All text that is neither part of a call nor a mark of reasoning or of the recipient is emitted, in order."""
    format = format_of(name)
    text = data.draw(babble(format))
    events = parsed(format, text, data.draw(SIZES))
    reported = "".join(event.text for event in events if isinstance(event, (Content, Reasoning)))
    if any(isinstance(event, CallStart) for event in events):
        assert _is_within(reported, text)
    elif format.calls.style is not Style.CHANNELS:
        marks = [format.thinking.start, format.thinking.end, *format.thinking.answer] if format.thinking else []
        marks += [mark for mark in format.calls.asides if "{name}" not in mark]
        assert _without(reported, marks) == _without(text, marks)


@pytest.mark.few(12)
@pytest.mark.parametrize("name", one_of_each_shape(name for name in NAMES if name not in HEADERS))
@FEW
@given(data=st.data())
def test_without_calls_and_reasoning_all_is_content(name, data):
    text = data.draw(babble(format_of(name)))
    events = parsed(Format(format_of(name).calls), text, data.draw(SIZES), calls=False)
    assert events == ([Content(text)] if text else [])


def _without(text: str, marks: list[str]) -> str:
    for mark in sorted(filter(None, marks), key=len, reverse=True):
        text = re.sub(r"\s*".join(map(re.escape, "".join(mark.split()))), "", text)
    return "".join(text.split())


def _is_within(part: str, whole: str) -> bool:
    """Whether `part` is `whole` with some characters left out."""
    characters = iter(whole)
    return all(character in characters for character in part)


# -- bounds ------------------------------------------------------------------------------------------------

HOSTILE = {
    "nested": '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 20_000,
    "arguments first": '<tool_call>{"arguments": {"a": "' + "x" * 100_000,
    "string that never ends": '<tool_call>{"name": "' + "x" * 100_000,
    "keys": "<tool_call>{" + '"a": [[1]], ' * 8_000,
    "blanks": "<tool_call>" + " " * 100_000,
    "marks": "<tool_call>" * 10_000,
    "thoughts": "<think>" + "</think" * 10_000,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_held_back_text_is_bounded(case):
    parser, held, reported = Parser(format_of("hermes")), 0, []
    for i in range(0, len(HOSTILE[case]), 50):
        reported += parser.push(HOSTILE[case][i : i + 50])
        held = max(held, parser.held)
    reported += parser.finish()
    assert held <= MAX_HELD + 100
    message = ParsedMessage.of(reported)
    reply = message.content + message.reasoning + "".join(call.arguments for call in message.calls)
    assert len(reply) > len(HOSTILE[case].replace(" ", "")) * 0.9 - 100


@pytest.mark.parametrize("name", ["pythonic", "glm45", "kimi_k2", "mistral"])
def test_hostile_nesting_is_no_recursion(name):
    format = format_of(name)
    text = written(format, [("f", {"a": "@"})])
    for nested in ("[" * 10_000, "[" * 10_000 + "]" * 10_000, '{"a":' * 10_000):
        events = parsed(format, text.replace("'@'", nested).replace('"@"', nested).replace("@", nested))
        assert events[0] == CallStart(0, "f", "functions.f:0" if name == "kimi_k2" else None)


# -- single cases ------------------------------------------------------------------------------------------


def message_of(name: str, text: str, reasoning: str = "auto", **options) -> ParsedMessage:
    return ParsedMessage.of(parsed(choose(tools=name, reasoning=reasoning), text, **options))


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [Call("f", None, "{}")]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [Call("f", None, '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', [Call("f", None, '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}', [Call("f", None, "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny\\d"}}', [Call("f", None, r'{"a": "x\ny\\d"}')]),
        ("mistral", '[TOOL_CALLS] {"name": "f", "arguments": {}}', [Call("f", None, "{}")]),
        ("mistral_args", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', [Call("f", "abcdefghi", '{"a": 1}')]),
        ("kimi_k2", '<|tool_call_begin|>f:3<|tool_call_argument_begin|>{"a":1}', [Call("f", "f:3", '{"a":1}')]),
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.a.b:0<|tool_call_argument_begin|> <|tool_call_end|>",
            [Call("a.b", "functions.a.b:0", "{}")],
        ),
        ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", [Call("f", None, '{"a": 1}')]),
        ("minimax_m2", '<invoke name="f"><parameter name="a">1</parameter></invoke>', [Call("f", None, '{"a": 1}')]),
        (
            "deepseek_v32",
            '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">1</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="b" string="false">["x"]</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="c" string="false">"x"</｜DSML｜parameter>\n</｜DSML｜invoke>',
            [Call("f", None, '{"a": "1", "b": ["x"], "c": "x"}')],
        ),
        ("nemotron", '<TOOLCALL>[{"name": "f", "arguments": {}}]</TOOLCALL>', [Call("f", None, "{}")]),
        ("glm45", "<tool_call>f</tool_call>", [Call("f", None, "{}")]),
        ("phi4", 'functools[{"name": "f", "arguments": {}}]', [Call("f", None, "{}")]),
        ("pythonic", "<|python_start|>[f(a='\\x41\\u00e9\\'', b=(1, .5, +2_0))]<|python_end|>",
         [Call("f", None, '{"a": "Aé\'", "b": [1, 0.5, 20]}')]),
        ("pythonic", '[f(a="""x"y""", b={"k": [True,]},)]', [Call("f", None, '{"a": "x\\"y", "b": {"k": [true]}}')]),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {}}', [Call("f", None, "{}")]),
        ("llama3", '{"type": "function", "name": "f", "parameters": {}}', [Call("f", None, "{}")]),
        ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', [Call("f", None, '{"a": 1}')]),
        ("harmony", '<|channel|>analysis to=functions.f code<|message|>{"a":1}<|call|>', [Call("f", None, '{"a":1}')]),
        ("harmony", "<|channel|>commentary to=functions.f<|message|><|call|>", [Call("f", None, "{}")]),
    ],
)  # fmt: skip
def test_other_ways_to_write_a_call(name, text, calls):
    message = message_of(name, text)
    assert message.calls == calls and not message.content


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "the mark <tool_call> begins a call"),
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'),
        ("llama3", '{"name": "Ann", "parameters": {}}'),
        ("llama3", '{"city": "Malmö", "name": "f", "parameters": {}}'),
        ("llama3", '{"parameters": {}, "name": "f"}'),
        ("llama3", '{"name": "x", "name": "f", "parameters": {}}'),
        ("llama3", '{"n\\u0061me": "f", "parameters": {}}'),
        ("llama3", '\xa0{"name": "f", "parameters": {}}'),
        ("pythonic", "[a link](http://example.org)"),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[g(1)]"),
        ("command_r", "Action: none"),
        ("granite", "<|tool_call|>[]"),
        ("harmony", "no header at all"),
        ("harmony", "to=5 is what I mean"),
    ],
)
def test_text_that_is_no_call_is_content(name, text):
    assert message_of(name, text, reasoning="none", tools={"f": {}}) == ParsedMessage(content=text)


def test_text_after_broken_arguments_is_content():
    events = parsed(format_of("hermes"), '<tool_call>{"name": "f", "arguments": {"a": !}} </tool_call>x')
    assert events == [CallStart(0, "f"), Arguments(0, '{"a": '), CallEnd(0), Content("!}} </tool_call>x")]


def test_a_call_ends_reasoning_that_was_not_closed():
    text = '<think>I call <tool_call> now\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call></think>done'
    message = ParsedMessage.of(parsed(format_of("hermes"), text, tools={"f": {}}))
    assert message == ParsedMessage("done", "I call <tool_call> now", [Call("f", None, "{}")])
    other = ParsedMessage.of(parsed(format_of("hermes"), text, tools={"g": {}}))
    assert (other.content, other.calls) == ("done", [])


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, " x\n", " x\n"),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": "number"}, "12", 12),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "None", None),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "001", "001"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "7", 7),
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({}, "[1, 2]", [1, 2]),
        ({}, "NaN", "NaN"),
        ({}, '"quoted"', '"quoted"'),
        ({"type": "array"}, "[1, 2", "[1, 2"),
    ],
)
def test_the_schema_decides_what_untyped_text_is(schema, text, value):
    tool = {"properties": {"a": schema}, "$defs": {"Point": {"type": "object"}}}
    reply = f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"
    assert json.loads(message_of("glm45", reply, tools={"f": tool}).calls[0].arguments) == {"a": value}


def test_a_mark_inside_a_value_is_part_of_it():
    text = "<tool_call>f<arg_key>a</arg_key><arg_value>see </arg_value> or </tool_call> here</arg_value></tool_call>"
    arguments = message_of("glm45", text).calls[0].arguments
    assert json.loads(arguments) == {"a": "see </arg_value> or </tool_call> here"}


def test_harmony_channels():
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
        "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    format = format_of("harmony")
    assert ParsedMessage.of(parsed(format, text)) == ParsedMessage("I look.Done.", "hm", [Call("f", None, '{"a": 1}')])
    assert ParsedMessage.of(parsed(Format(format.calls), text)).content == "hmI look.Done."
