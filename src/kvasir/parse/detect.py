"""Finds a model's output format from its chat template: tool calls by a round trip, reasoning by its marks.

A format is the template's if the parser returns the calls that the template wrote unchanged, with nothing left over. If
the template writes no calls, the marks in its source decide: many templates explain in the prompt how to call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from kvasir.parse.events import CallEnd, Content, Event, ParsedMessage, Reasoning
from kvasir.parse.format import CallFormat, Format, ThinkingFormat, grammar_parts
from kvasir.parse.parser import Parser
from kvasir.parse.table import CALLS, NO_CALLS, THINKING

SHOWN = 160  # characters of output that is not understood


@dataclass(frozen=True, slots=True)
class Sample:
    """A model's output as the template writes it, with the prompt before it. turn_end: the text that it writes after
    any output. calls: names and arguments; tools: the functions' schemas by name."""

    prompt: str
    turn: str
    turn_end: str
    calls: tuple[tuple[str, Mapping[str, Any]], ...]
    tools: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class DetectedFormat:
    """fault: why calls cannot be parsed, as a message for users; "" if they can, or if the template does not support
    tools."""

    format: Format
    fault: str = ""


def detect(template: str, special_tokens: Collection[str] = (), samples: Iterable[Sample] = ()) -> DetectedFormat:
    """template: its source. Reasoning marks may also occur among the vocabulary's special tokens."""
    samples = iter(samples)
    first = next(samples, None)
    shown = (first.prompt, first.turn) if first else ()  # some templates assemble their marks from parts
    seen = "\n".join((template, *special_tokens, *shown))
    thinking = next((row for row in THINKING if _shows(row.signs, seen)), None)
    for sample in chain(filter(None, [first]), samples):
        if (calls := _returning(sample, thinking, template)) is not None:
            return DetectedFormat(Format(calls, thinking))
    if first is not None:
        turn = first.turn if len(first.turn) <= SHOWN else first.turn[:SHOWN] + "..."
        return DetectedFormat(
            Format(NO_CALLS, thinking), f"the chat template writes tool calls in an unknown format: {turn!r}"
        )
    calls = next((row for row in CALLS if _shows(row.signs, template)), NO_CALLS)
    takes_tools = calls is NO_CALLS and re.search(r"\btools\b", template) is not None
    return DetectedFormat(
        Format(calls, thinking), "the chat template accepts tools and renders no calls" if takes_tools else ""
    )


def _returning(sample: Sample, thinking: ThinkingFormat | None, template: str) -> CallFormat | None:
    """The format whose parser returns the sample's calls. If several do, one that would write what the template wrote
    is preferred, then one whose signs the template contains."""
    rows = [row for row in CALLS if row is not NO_CALLS and _returns(sample, Format(row, thinking))]
    return min(rows, key=lambda row: (not _writes(row, sample), not _shows(row.signs, template)), default=None)


def _returns(sample: Sample, format: Format) -> bool:
    parser = Parser(format, sample.tools, opened=format.opened_by(sample.prompt))
    events = [*parser.push(sample.turn), *parser.finish()]
    calls = [_loaded(call.name, call.arguments) for call in ParsedMessage.of(events).calls]
    return calls == list(sample.calls) and _is_clean(events, format.thinking, sample.turn_end)


def _loaded(name: str, arguments: str) -> tuple[str, Any]:
    try:
        return name, json.loads(arguments)
    except ValueError:
        return name, None


def _is_clean(events: Sequence[Event], thinking: ThinkingFormat | None, turn_end: str) -> bool:
    """Whether there is no text besides reasoning marks and, after the last call, the end of the turn."""
    last = max(i for i, event in enumerate(events) if isinstance(event, CallEnd))
    turn = "".join(event.text for event in events[:last] if isinstance(event, Content | Reasoning))
    for mark in (thinking.start, thinking.end, *thinking.answer) if thinking else ():
        turn = turn.replace(mark, "") if mark else turn
    after = "".join(event.text for event in events[last:] if isinstance(event, Content))
    while after and turn_end and after[-1] == turn_end[-1]:
        after, turn_end = after[:-1], turn_end[:-1]
    return not turn.strip() and _TURN_ENDS.fullmatch(after) is not None


_TURN_ENDS = re.compile(r"(?:\s*[<\[][^<>\[\]\s]{1,40}(?:[>\]]|\Z))*\s*")


def _writes(row: CallFormat, sample: Sample) -> bool:
    """Whether the format's grammar would begin and end a call as the template does, except for white space."""
    parts = grammar_parts(Format(row), sample.calls[0][0])
    turn = _squeezed(sample.turn)
    return _squeezed(parts.begin) in turn and _squeezed(parts.end + parts.close) in turn


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _shows(signs: tuple[tuple[str, ...], ...], text: str) -> bool:
    return any(all(sign in text for sign in group) for group in signs)
