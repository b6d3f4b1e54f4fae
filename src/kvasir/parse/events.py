"""The events of a parser, and the whole message built from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of tool call number `index` of this output, counted from 0. `id` if the model wrote one."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a call. Its arguments are complete unless the model broke off inside them."""

    index: int


Event = Content | Reasoning | CallStart | Arguments | CallEnd


def merged(events: Iterable[Event]) -> list[Event]:
    """The events with adjacent pieces of one kind joined, so that the result does not depend on how the text is
    divided."""
    runs: list[tuple[Event, list[str]]] = []
    for event in events:
        if isinstance(event, (CallStart, CallEnd)):
            runs.append((event, []))
        elif runs and _continues(runs[-1][0], event):
            runs[-1][1].append(event.text)
        else:
            runs.append((event, [event.text]))
    return [_joined(first, pieces) for first, pieces in runs]


def merged_counts(read: Iterable[tuple[Event, int]]) -> tuple[list[Event], tuple[int, ...]]:
    """`merged` of events that each come with a count, and the last count of each merged event."""
    events: list[Event] = []
    counts: list[int] = []
    for event, count in read:
        if events and not isinstance(event, (CallStart, CallEnd)) and _continues(events[-1], event):
            counts[-1] = count
        else:
            counts.append(count)
        events.append(event)
    return merged(events), tuple(counts)


def _continues(first: Event, event: Event) -> bool:
    same = type(first) is type(event)
    return same and (not isinstance(event, Arguments) or first.index == event.index)  # type: ignore[union-attr]


def _joined(first: Event, pieces: list[str]) -> Event:
    text = "".join(pieces)
    if isinstance(first, Content):
        return Content(text)
    if isinstance(first, Reasoning):
        return Reasoning(text)
    return Arguments(first.index, text) if isinstance(first, Arguments) else first


@dataclass(slots=True)
class Call:
    """A tool call; `arguments` is JSON text."""

    name: str
    id: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class ParsedMessage:
    """A whole output, or the part received so far."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> ParsedMessage:
        message = cls()
        for event in merged(events):
            if isinstance(event, Content):
                message.content += event.text
            elif isinstance(event, Reasoning):
                message.reasoning += event.text
            elif isinstance(event, CallStart):
                message.calls.append(Call(event.name, event.id))
            elif isinstance(event, Arguments):
                message.calls[event.index].arguments += event.text
        return message
