"""Targets: what models say, what clients ask for, and recipes of models."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from typing import Any

from kvasir.errors import KvasirError
from kvasir.guided import sources
from kvasir.guided.lark import Lark, behind_reasoning
from kvasir.guided.schema import prepared
from kvasir.guided.text_grammar import TextGrammar, between_marks, in_json
from kvasir.guided.tools import Function, tool_grammar
from kvasir.parse.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning, merged
from kvasir.parse.format import Format, Style
from kvasir.parse.parser import Parser
from kvasir.parse.table import CALLS, THINKING
from kvasir.store.modelfile import parse_modelfile, write_modelfile
from kvasir.text.messages import CallStyle, check_messages, normalize_messages
from tests.fuzz.mutate import mutate_json
from tests.fuzz.target import Target

SPECIALS = {"<tool_call>": 5, "</tool_call>": 6, "<think>": 7, "</think>": 8, "<|channel|>": 9, "<|message|>": 10}
TOOLS = {"f": {"properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}, "get_weather": {}}
SCHEMA_WORDS = tuple(
    """type properties required items anyOf allOf oneOf not enum const $ref $defs #/$defs/a pattern minLength maxLength
    minimum maximum multipleOf additionalProperties patternProperties nullable string integer number object array null
    boolean prefixItems minItems maxItems uniqueItems format date-time minProperties description""".split()
)


def _marks() -> tuple[str, ...]:
    """Every mark of every format, for the dictionary."""
    found: set[str] = set()
    for calls in CALLS:
        texts = (calls.texts.open, calls.texts.begin, calls.texts.end, calls.texts.separator, calls.texts.close)
        found |= {*texts, *calls.begins, *calls.ends, *calls.fence, *calls.also}
        if p := calls.parameters:
            found |= {p.key_begin, p.key_end, p.value_begin, p.value_end, *(p.kinds or ())}
    for row in THINKING:
        found |= {row.start, row.end, *row.answer}
    return tuple(sorted(mark.replace("{name}", "f").replace("{index}", "0") for mark in found if mark))


# --- the parser -------------------------------------------------------------------------------------


def read_answer(data: bytes) -> None:
    """Four bytes of choices, then the text."""
    if len(data) < 4:
        return
    thinking = (None, *THINKING)[data[1] % (len(THINKING) + 1)]
    format = Format(CALLS[data[0] % len(CALLS)], thinking)
    options = {"tools": (None, TOOLS)[data[2] & 1], "calls": not data[2] & 2, "opened": bool(data[2] & 4)}
    text = data[4:].decode("utf-8", "replace")
    size = data[3] % 7 + 1
    whole = _parsed(format, [text], options)
    assert _parsed(format, [text[i : i + size] for i in range(0, len(text), size)], options) == whole
    _check_events(whole)
    reported = "".join(event.text for event in whole if isinstance(event, Content | Reasoning))
    assert _is_within(reported, text), "content that the model did not write"
    if not options["calls"] and thinking is None and format.calls.style is not Style.CHANNELS:
        assert reported == text, "text was lost"


def _parsed(format: Format, pieces: list[str], options: dict[str, Any]) -> list[Event]:
    parser = Parser(format, **options)
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged([*events, *parser.finish()])


def _check_events(events: list[Event]) -> None:
    """Calls come one after the other, each begun and ended, with arguments inside alone."""
    inside: int | None = None
    count = 0
    for event in events:
        if isinstance(event, CallStart):
            assert inside is None and event.index == count and event.name
            inside, count = event.index, count + 1
        elif isinstance(event, CallEnd):
            assert inside == event.index
            inside = None
        elif isinstance(event, Arguments):
            assert inside == event.index
    assert inside is None


def _is_within(part: str, whole: str) -> bool:
    characters = iter(whole)
    return all(character in characters for character in part)


# --- grammars ---------------------------------------------------------------------------------------


def read_schema(data: bytes) -> None:
    """Lenient or not, what is made ready is JSON, and making it ready once more changes nothing."""
    schema = _json(data)
    if not isinstance(schema, dict | bool):
        return
    for lenient in (False, True):
        with suppress(KvasirError):
            json.loads(sources.json_schema(schema, lenient))
            ready = prepared(schema, lenient)
            assert prepared(ready, lenient) == ready
    sources.structural_tags([sources.Tag("<tool_call>x", schema, "</tool_call>")], ["<tool_call>"], SPECIALS)


def read_tools(data: bytes) -> None:
    """[a format's number, [{"name": ..., "parameters": {...}, "strict": ...}]]: a grammar for such calls."""
    reported = _json(data)
    if (
        not isinstance(reported, list)
        or len(reported) != 2
        or type(reported[0]) is not int
        or not isinstance(reported[1], list)
    ):
        return
    calls = [row for row in CALLS if row.style is not Style.NONE]
    format = Format(calls[reported[0] % len(calls)], THINKING[reported[0] % len(THINKING)])
    functions = [_function(one) for one in reported[1][:4] if isinstance(one, dict)]
    if not functions:
        return
    for function in functions:
        function.check()
        json.dumps(function.loosened().parameters)
    assert tool_grammar(format, functions, SPECIALS, required=reported[0] % 2 == 0)


def _function(reported: dict[str, Any]) -> Function:
    name, parameters = reported.get("name"), reported.get("parameters")
    name = name if isinstance(name, str) and name and name.isprintable() else "f"
    return Function(name, parameters if isinstance(parameters, dict) else {}, reported.get("strict") is True)


def read_grammar(data: bytes) -> None:
    """A grammar's text, as a client sends it, and in what becomes of it; also as that of a custom tool."""
    text = data.decode("utf-8", "replace")
    assert "<tool_call>" in text or sources.by_id(text, {"<tool_call>": 5}) == text
    changed = sources.by_id(text, SPECIALS)
    json.loads(behind_reasoning(changed, Format(CALLS[0], THINKING[0]), SPECIALS)) if changed[:1] != "{" else None
    sources.choice(text.split("|"))
    "".join(sources.literals(text, SPECIALS))
    for embed in (in_json, partial(between_marks, end=['"</p>"'], without=["</p>"])):
        with suppress(KvasirError):
            assert embed(Lark(SPECIALS), "text", TextGrammar("lark", text)) == "text"


# --- conversations and recipes ----------------------------------------------------------------------


def read_messages(data: bytes) -> None:
    """A conversation, for every kind of template; the caller's own stays as it was."""
    messages = _json(data)
    if not isinstance(messages, list):
        return
    before = json.dumps(messages)
    for kind in range(8):
        style = CallStyle(bool(kind & 4), (("",), ("", None), (None,))[kind % 3])
        with suppress(KvasirError):
            check_messages(messages)
            found = normalize_messages(messages, bool(kind & 1), bool(kind & 2), style)
            assert len(found) >= len(messages) and json.dumps(found)
    assert json.dumps(messages) == before


def read_modelfile(data: bytes) -> None:
    """What parses can be written, and parses to the same."""
    model = parse_modelfile(data.decode("utf-8", "replace"))
    with suppress(KvasirError):
        text = write_modelfile(model)
        assert parse_modelfile(text) == model


def _json(data: bytes) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(data)
    return None


TARGETS = {
    "parser": Target(read_answer, words=(*_marks(), '{"name": "f", "arguments": {"a": 1}}', "get_weather", "```json")),
    "schema": Target(read_schema, mutate=partial(mutate_json, words=SCHEMA_WORDS)),
    "tools": Target(read_tools, mutate=partial(mutate_json, words=(*SCHEMA_WORDS, "name", "parameters", "strict"))),
    "grammar": Target(
        read_grammar, words=("start:", "::=", "root", "%json", "%llguidance", "<[5]>", "%ignore", *SPECIALS)
    ),
    "messages": Target(
        read_messages,
        mutate=partial(
            mutate_json,
            words=tuple("role content tool_calls function arguments text type thinking user assistant {}".split()),
        ),
    ),
    "modelfile": Target(
        read_modelfile,
        words=tuple(
            'FROM PARAMETER TEMPLATE SYSTEM MESSAGE LICENSE REQUIRES ADAPTER """ temperature stop num_ctx'.split()
        ),
    ),
}
