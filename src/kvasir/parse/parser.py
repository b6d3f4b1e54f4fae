"""Parser: a model's output text in, events out.

    text -> Tape -> the routines of this file and of objects, headed, python_calls, addressed, channels -> events

The parser's decisions depend only on the text, not on how it is divided into pieces. It reads every character once, and
holds back only text that may still become a mark, or the head of a call that is not certain yet.

A call begins at a mark. Until the name is known and the arguments have begun, it may turn out not to be a call: then
the text read so far is content. After that, everything is emitted as it arrives; where the text breaks off or becomes
invalid, the call ends, and the rest is content.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence

from kvasir.parse.addressed import addressed
from kvasir.parse.channels import messages
from kvasir.parse.emitter import Emitter, ParseRoutine, Schema
from kvasir.parse.events import Event, merged
from kvasir.parse.format import Format, Style
from kvasir.parse.headed import headed
from kvasir.parse.objects import objects
from kvasir.parse.python_calls import python_calls
from kvasir.parse.tape import Emit, marks

_ROUTINES: dict[Style, Callable[[Emitter, bool], ParseRoutine]] = {
    Style.OBJECTS: objects,
    Style.KEYED: objects,
    Style.NAMED: headed,
    Style.MARKED: headed,
    Style.PARAMETERS: headed,
    Style.PYTHON: python_calls,
    Style.ADDRESSED: addressed,
}


class Parser:
    """Parses one output. `push` its text as it arrives, then `finish`."""

    def __init__(
        self, format: Format, tools: Mapping[str, Schema] | None = None, calls: bool = True, opened: bool = False
    ):
        """tools: the available functions by name, with the JSON schemas of their arguments, which decide how untyped
        text is converted. A call without a mark of its own counts only if it names one of them. None: the functions
        are not known.
        calls: False leaves calls in the content.
        opened: the prompt opened the reasoning (`Format.opened_by`).
        """
        self._format = format
        self._opened = opened
        self._emitter = Emitter(format.calls, tools if calls else {})
        self._tape = self._emitter.tape
        recipients = calls or format.calls.style is Style.ADDRESSED  # content has a recipient too
        self._begins = format.calls.begins if recipients else ()
        names = [*(tools or ())]
        self._asides = tuple(a.replace("{name}", n) for a in format.calls.asides for n in _names_in(a, names))
        self._bare = format.calls.bare and recipients
        channels = format.calls.style is Style.CHANNELS
        self._steps = messages(self._emitter, calls, format.thinking is not None) if channels else self._answer()

    def push(self, text: str) -> list[Event]:
        """The events that this text makes certain. Never raises, whatever the text."""
        self._tape.push(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """The remaining events at the end of the output: text held back, and the end of a call that was broken off,
        whose arguments stay incomplete. No text may be pushed afterwards."""
        self._tape.ended = True
        return self._advance()

    @property
    def held(self) -> int:
        """How many characters are kept after a `push`, since they may still become a mark or a call: about MAX_HELD at
        most."""
        return len(self._tape.text)

    def _advance(self) -> list[Event]:
        next(self._steps, None)
        events, self._emitter.events = self._emitter.events, []
        return merged(events)

    def _answer(self) -> ParseRoutine:
        tape, emitter, thinking = self._tape, self._emitter, self._format.thinking
        stray_end = self._asides
        mark: str | None = None
        if thinking:
            answer_begin, answer_end = thinking.answer
            lead = marks(thinking.start, thinking.end, *filter(None, [answer_begin]))
            opened = self._opened
            while opened or (mark := (yield from tape.skip(lead))) in (thinking.start, thinking.end):
                if mark == thinking.end:  # some models write the end mark when they do not reason
                    yield from tape.blank()
                elif (yield from self._think(thinking.end)):
                    stray_end += (thinking.end,)
                opened = False
            if mark:
                yield from tape.blank()
                stray_end += (answer_end,) if answer_end else ()
        if self._bare and not mark:
            yield from self._call(emitter.content, bare=True)
        ignored = frozenset(stray_end)
        wanted = marks(*self._begins, *stray_end)
        while found := (yield from tape.until(wanted, emitter.content)):
            if found[1] in ignored:
                tape.pos = found.end()
            else:
                yield from self._call(emitter.content)

    def _think(self, end: str) -> Generator[None, None, bool]:
        """Reasoning up to its end mark, or up to a call, since models may omit the mark. Returns whether the mark was
        omitted."""
        tape = self._tape
        wanted = marks(end, *self._begins)
        yield from tape.blank()
        while found := (yield from tape.until(wanted, self._emitter.reasoning)):
            if found[1] == end:
                tape.pos = found.end()
                yield from tape.blank()
                return False
            if (yield from self._call(self._emitter.reasoning, known=True)):
                return True
        return False

    def _call(self, otherwise: Emit, bare: bool = False, known: bool = False) -> Generator[None, None, bool]:
        """A call at a mark, or without a mark if `bare`; text that turns out not to be a call is passed to `otherwise`.
        known: only known functions count. Returns whether it was a call."""
        emitter = self._emitter
        count, emitter.known = emitter.count, known or bare
        emitter.tape.hold()
        yield from _ROUTINES[self._format.calls.style](emitter, bare)
        if rest := emitter.tape.release():
            (emitter.content if emitter.count > count else otherwise)(rest)
        return emitter.count > count


def _names_in(aside: str, names: Sequence[str]) -> Sequence[str]:
    return names if "{name}" in aside else ("",)
