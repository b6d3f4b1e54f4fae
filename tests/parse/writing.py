"""Tool calls written as models write them: by `grammar_parts`, which the parser does not use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from hypothesis import strategies as st

from kvasir.parse.events import Event, merged
from kvasir.parse.format import Format, ParameterFormat, Style, grammar_parts
from kvasir.parse.marked_text import QUOTE
from kvasir.parse.parser import Parser
from kvasir.parse.table import CALLS, THINKING

Calls = list[tuple[str, dict[str, Any]]]

_THINKING = {
    "harmony": "harmony",
    "command_a": "cohere",
    "mistral_args": "mistral",
    "granite": "granite",
    "seed_oss": "seed_oss",
    "gemma4": "gemma",
}


def format_of(name: str) -> Format:
    """A row of calls with the reasoning that such models have."""
    calls = next(row for row in CALLS if row.name == name)
    return Format(calls, next(row for row in THINKING if row.name == _THINKING.get(name, "think")))


HEADERS = ("harmony", "muse", "functionary_v3.2")  # formats in which messages have headers
NAMES = [calls.name for calls in CALLS]
CALLING = [calls.name for calls in CALLS if calls.style is not Style.NONE]


def _shape(value: Any) -> object:
    """A format without what its marks say: which there are, and all switches."""
    if is_dataclass(value):
        return type(value).__name__, *(_shape(getattr(value, f.name)) for f in fields(value) if f.name != "name")
    return bool(value) if isinstance(value, (str, tuple, dict)) else repr(value)


def one_of_each_shape(names: Iterable[str]) -> list[Any]:
    """Parameters of a test that shows what one code does with all formats of a shape: the others are slow. What their
    marks are is tested by calls that come back, and by what models write (test_families)."""
    seen: set[object] = set()
    found = []
    for name in names:
        shape = _shape(format_of(name))
        found.append(pytest.param(name, marks=pytest.mark.slow) if shape in seen else name)
        seen.add(shape)
    return found


def written(format: Format, calls: Calls) -> str:
    """The calls as one text."""
    text = "<|channel|>commentary" if format.calls.style is Style.CHANNELS else ""
    for i, (name, arguments) in enumerate(calls):
        parts = grammar_parts(format, name, i)
        text += (parts.separator + parts.begin_next if i else parts.begin) + _arguments(format, arguments) + parts.end
        text += parts.close if i == len(calls) - 1 else ""
    return text


def _arguments(format: Format, arguments: dict[str, Any]) -> str:
    marks = format.calls.parameters
    if format.calls.style is Style.PYTHON:
        return ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    if format.calls.style is Style.MARKED:
        return _marked(arguments).replace(QUOTE, format.calls.quote)
    if marks is None:
        return json.dumps(arguments, ensure_ascii=False)
    line = "\n" if marks.lines else ""
    return "".join(
        f"{marks.key_begin}{key}{marks.key_end}{_kind(marks, value)}{line}{marks.value_begin}"
        f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}{line}"
        f"{marks.value_end.replace('{key}', key)}\n"
        for key, value in arguments.items()
    )


def _kind(marks: ParameterFormat, value: Any) -> str:
    if isinstance(value, str) or not marks.kinds:
        return marks.kinds[0] if marks.kinds else ""
    kind = {"integer": "number"}.get(_type(value), _type(value))
    return next((text for text in marks.kinds[1:] if text.startswith(kind)), marks.kinds[1])


def _marked(value: Any) -> str:
    if isinstance(value, str):
        return QUOTE + value + QUOTE
    if isinstance(value, list):
        return f"[{','.join(map(_marked, value))}]"
    if isinstance(value, dict):
        keys = {key: key if re.fullmatch(r"\w+", key) else _marked(key) for key in value}
        return "{" + ",".join(f"{keys[key]}:{_marked(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


def schemas(calls: Calls) -> dict[str, dict[str, Any]]:
    """The functions' schemas, which say of each argument what type it has."""
    found: dict[str, dict[str, Any]] = {}
    for name, arguments in calls:
        properties = found.setdefault(name, {"type": "object", "properties": {}})["properties"]
        for key, value in arguments.items():
            properties.setdefault(key, {"type": []})["type"].append(_type(value))
    return found


def _type(value: object) -> str:
    types = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return types.get(type(value), "null")


def parsed(format: Format, text: str, sizes: list[int] | None = None, **options: Any) -> list[Event]:
    """All events of a text that comes in pieces of these sizes, the rest at once; adjacent ones joined."""
    parser = Parser(format, **options)
    events: list[Event] = []
    for size in sizes or ():
        events += parser.push(text[:size])
        text = text[size:]
    return merged([*events, *parser.push(text), *parser.finish()])


# -- strategies --------------------------------------------------------------------------------------------

PLAIN = st.text(st.sampled_from("abc XYZ,.:;\n'\\\"é漢0-{}[]()"), max_size=30)
NAME = st.from_regex(r"[a-z_][a-z0-9_]{0,12}", fullmatch=True)
SCALAR = st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<\x85\u2028\u2029"), max_size=20)
VALUE = st.recursive(
    SCALAR | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
CALL = st.tuples(NAME, st.dictionaries(NAME, VALUE, max_size=3))
CALL_LISTS = st.lists(CALL, min_size=1, max_size=3, unique_by=lambda call: call[0])
SIZES = st.lists(st.integers(0, 9), max_size=40)


@st.composite
def babble(draw: st.DrawFn, format: Format) -> str:
    """What a broken model might say: plain text, whole calls, and every mark of the format in any order."""
    texts, calls, thinking = format.calls.texts, format.calls, format.thinking
    marks = [texts.begin, texts.end, texts.open, texts.separator, texts.close, *calls.begins, *calls.ends]
    marks += [thinking.start, thinking.end, *thinking.answer] if thinking else []
    parameters = calls.parameters
    marks += (
        [parameters.key_begin, parameters.key_end, parameters.value_begin, parameters.value_end] if parameters else []
    )
    marks += ['{"name": "f", "arguments": {', '"arguments": "{}"', "{", "}", '"', "```json", "<|message|>", "<|end|>"]
    pieces = PLAIN | st.sampled_from([mark.replace("{name}", "f") for mark in marks if mark])
    if calls.style is not Style.NONE:
        pieces |= CALL_LISTS.map(lambda drawn: written(format, drawn))
    return "".join(draw(st.lists(pieces | pieces.map(lambda text: text[: len(text) // 2]), max_size=10)))
