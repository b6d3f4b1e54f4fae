"""Answers in which each message names its recipient, and whose prompt has written the mark before the first name."""

from __future__ import annotations

import pytest

from kvasir.parse.events import ParsedMessage
from kvasir.parse.format import Format
from kvasir.parse.parser import Parser
from tests.parse.writing import format_of, parsed

FORMAT = Format(format_of("functionary_v3.2").calls)
TOOLS = {"look_up": {}, "fetch": {}}


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("all\nHello\nyou", "Hello\nyou", []),
        (">>>all\nHello", "Hello", []),
        ('look_up\n{"a": 1}', "", [("look_up", '{"a": 1}')]),
        ('look_up\n{"a": 1}>>>fetch\n{}', "", [("look_up", '{"a": 1}'), ("fetch", "{}")]),
        ('all\nLooking it up.\n>>>look_up\n{"a": 1}', "Looking it up.", [("look_up", '{"a": 1}')]),
        ('look_up\n{"a": 1}>>>all\nDone', "Done", [("look_up", '{"a": 1}')]),
        # what is no recipient is content: an interpreter's prompt, a name of no function, a word in a separate line
        ("all\n>>> print(1)\n1\n>>>x\n{'a'}", ">>> print(1)\n1\n>>>x\n{'a'}", []),
        ("all\n>>>drop\n{}", ">>>drop\n{}", []),
        ("look_up\nis a word", "look_up\nis a word", []),
        ("Hello\n{}", "Hello\n{}", []),
        ("all of it", "all of it", []),
        ('{"a": 1}', '{"a": 1}', []),
        ("", "", []),
    ],
)
def test_messages_go_to_their_recipients(text, content, calls):
    for sizes in ([], [1] * len(text)):
        message = ParsedMessage.of(parsed(FORMAT, text, sizes, tools=TOOLS))
        assert (message.content, [(call.name, call.arguments) for call in message.calls]) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('look_up\n{"a": 1}', "", [("look_up", '{"a": 1}')]),
        ('look_up\n{"a": 1}<|assistant|>fetch\n{"b": [2]}', "", [("look_up", '{"a": 1}'), ("fetch", '{"b": [2]}')]),
        ("\nlook_up is a word", "look_up is a word", []),
        ("all\nof it", "all\nof it", []),
        ("drop\n{}", "drop\n{}", []),
    ],
)
def test_text_without_a_recipient_stays_whole(text, content, calls):
    for sizes in ([], [1] * len(text)):
        message = ParsedMessage.of(parsed(Format(format_of("glm4").calls), text, sizes, tools=TOOLS))
        assert (message.content.strip(), [(c.name, c.arguments) for c in message.calls]) == (content, calls)


def test_without_tools_the_recipient_is_no_content_either():
    assert ParsedMessage.of(parsed(FORMAT, 'all\nHello>>>look_up\n{"a": 1}', calls=False)) == ParsedMessage(
        'Hello>>>look_up\n{"a": 1}'
    )


def test_content_is_not_held_back():
    parser = Parser(FORMAT, TOOLS)
    assert ParsedMessage.of(parser.push("all\nA first line without an end")).content == "A first line without an end"
    parser = Parser(FORMAT, TOOLS)
    assert ParsedMessage.of(parser.push("No recipient at all, ")).content == "No recipient at all,"


PYTHON = {"python": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}}


def test_code_without_json_is_no_call_and_stays_whole():
    """The template announces raw code for a code interpreter alone, which is no function of a request; of functions it
    says `Use JSON for function arguments`. What is no JSON has no parameter that it could be the value of."""
    for code in ("print(1)", "x = {'a': 1}\nx", "if a >>> b:\n    pass\n", "[1, 2]", '"a"'):
        for text in (f"python\n{code}", f"all\nSo:\n>>>python\n{code}"):
            for sizes in ([], [1] * len(text)):
                message = ParsedMessage.of(parsed(FORMAT, text, sizes, tools=PYTHON))
                assert (message.content, message.calls) == (text.removeprefix("all\n"), [])
    message = ParsedMessage.of(parsed(FORMAT, 'python\n{"code": "print(1)"}', tools=PYTHON))
    assert not message.content and message.calls[0].arguments == '{"code": "print(1)"}'
