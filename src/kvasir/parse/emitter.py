"""The shared state of a parser's routines: the text, the events made from it, and the known functions."""

from __future__ import annotations

from collections.abc import Generator, Mapping

from kvasir.parse.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning
from kvasir.parse.format import CallFormat
from kvasir.parse.tape import Tape, marks

MAX_NAME = 256

Schema = Mapping[str, object]
ParseRoutine = Generator[None, None, None]


class Emitter:
    """The state of parsing one output; `events` are those not yet returned."""

    def __init__(self, calls: CallFormat, tools: Mapping[str, Schema] | None):
        self.calls = calls
        self.tools = tools
        self.tape = Tape()
        self.events: list[Event] = []
        self.count = 0  # number of calls that have ended
        self.known = False  # only calls of known functions count
        self._fresh = False  # a call has ended, and only blanks have followed

    def content(self, text: str) -> None:
        if not text or (self._fresh and self.tape.ended and text.isspace()):
            return
        self._fresh = False
        self.events.append(Content(text))

    def reasoning(self, text: str) -> None:
        self.events.append(Reasoning(text))

    def start(self, name: str, id: str | None = None) -> None:
        """Starts a call that is now certain: the text held for it is not content."""
        self.tape.release()
        self.events.append(CallStart(self.count, name, id))

    def arguments(self, text: str) -> None:
        self.events.append(Arguments(self.count, text))

    def end(self) -> None:
        self.events.append(CallEnd(self.count))
        self.count += 1
        self._fresh = True

    def is_name(self, name: object) -> bool:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            return False
        return not self.known or self.tools is None or name in self.tools

    def closed(self, *closing: str) -> ParseRoutine:
        """Consume the marks that close a call, as far as they are present; the output may be truncated within a
        mark."""
        for text in filter(None, closing):
            if (yield from self.tape.skip(marks(text))) or self.tape.cut(text):
                self.tape.hold()
