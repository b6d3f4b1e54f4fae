"""Spans: the trace of one HTTP request, as far as it happens in this server.

Format of the headers: https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvasir.types import Note

MAX_STATE = 512  # characters of a tracestate that are kept
_PARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(-.*)?"
)
_SPANS = ("queue", "prefill", "decode", "steps")  # notes that last
INTERNAL, SERVER = 1, 2  # kinds of spans


@dataclass(slots=True)
class Span:
    """Times are in seconds since 1970. events: (name, time, facts)."""

    name: str
    parent: str
    begin: float
    end: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[str, float, Mapping[str, Any]]] = field(default_factory=list)
    kind: int = INTERNAL
    failed: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class TraceContext:
    """What a request says about its trace. parent: the caller's span, "" if there is none."""

    trace: str
    parent: str = ""
    sampled: bool = True
    state: str = ""

    @classmethod
    def of(cls, parent: str | None, state: str | None) -> TraceContext | None:
        """From the headers traceparent and tracestate; None without a valid traceparent."""
        found = _PARENT.fullmatch((parent or "").strip())
        if not found or found["version"] == "ff" or not int(found["trace"], 16) or not int(found["span"], 16):
            return None
        if found["version"] == "00" and found[5]:
            return None
        sampled = bool(int(found["flags"], 16) & 1)
        return cls(found["trace"], found["span"], sampled, (state or "")[:MAX_STATE])

    @classmethod
    def new(cls, ratio: float) -> TraceContext:
        """A trace that begins here, sampled with this probability: by the last 56 bits of its id, as OpenTelemetry
        does."""
        trace = secrets.token_hex(16)
        return cls(trace, sampled=int(trace[18:], 16) < ratio * (1 << 56))

    def header(self, span: str) -> str:
        """The traceparent of what this span calls."""
        return f"00-{self.trace}-{span}-{self.sampled:02x}"


def spans_of(notes: list[Note], request: Span) -> Iterator[Span]:
    """The spans below a request of the engine, from its notes: one for each replica that it was at, with its steps.
    What happens in between are events of `request`."""
    at = request
    for note in notes:
        if note.name in _SPANS:
            yield Span(note.name, at.id, note.begin, note.end, note.facts)
            at.end = max(at.end, note.end)
        elif note.name == "replica":
            if at is not request:
                yield at
            at = Span(f"replica {note.facts.get('replica')}", request.id, note.begin, note.end, note.facts)
        else:
            request.events.append((note.name, note.begin, note.facts))
            at.end = max(at.end, note.end)
            at.failed |= note.name == "lost" and at is not request
    if at is not request:
        yield at
