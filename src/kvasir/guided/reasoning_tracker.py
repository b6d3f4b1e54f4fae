"""Tracks, token by token, whether a sequence is inside its reasoning."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from kvasir.guided.rule import ReasoningMarks
from kvasir.parse.tape import MAX_SPACE


class ReasoningTracker:
    """A function of the tokens' bytes. Reasoning begins at the start of a sequence, or where the prompt has opened it,
    as `parse.parser` reads it; several parts may follow each other.

    inside: the current state. over: no more reasoning can begin. tokens: the number of reasoning tokens, without
    marks. rest: the text after the last mark if the last token completed a mark; else None.
    """

    __slots__ = ("_anywhere", "_blanks", "_end", "_start", "inside", "over", "rest", "tail", "tokens")

    def __init__(self, reasoning: ReasoningMarks):
        self._start, self._end = reasoning.start.encode(), reasoning.end.encode()
        self._anywhere = reasoning.anywhere
        self.inside, self.over = reasoning.opened, False
        self.tail = b""  # the end of the text, which may become a mark
        self.tokens = 0
        self._blanks = 0  # before any other text
        self.rest: bytes | None = None

    def copy(self) -> ReasoningTracker:
        other = ReasoningTracker.__new__(ReasoningTracker)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        return other

    def feed(self, data: bytes) -> None:
        text, was, self.rest = self.tail + data, self.inside, None
        self.tail = b""
        while not self.over:
            mark = self._end if self.inside else self._start
            if not (self.inside or self._anywhere):
                size, text = len(text), text.lstrip()
                self._blanks += size - len(text)
                # A model that first states that it does not think may still think.
                first = next((m for m in (mark, self._end) if text.startswith(m)), None)
                if self._blanks > MAX_SPACE or first is None:
                    begins = mark.startswith(text) or self._end.startswith(text)
                    self.tail, self.over = text, self._blanks > MAX_SPACE or not begins
                    break
                mark = first
            at = text.find(mark)
            if at < 0:
                self.tail = overlap(text, (mark,)) if mark[0] in text else b""
                break
            self.inside = not self.inside and mark == self._start
            self._blanks = -sys.maxsize
            self.rest = text = text[at + len(mark) :]
        self.tokens += was and self.inside

    def leave(self) -> None:
        """Ends the reasoning for a reason other than its mark."""
        self.inside, self.over, self.tail = False, not self._anywhere, b""


def overlap(text: bytes, marks: Iterable[bytes]) -> bytes:
    """The longest end of the text that is an incomplete beginning of a mark."""
    marks = tuple(marks)
    for size in range(min(max(map(len, marks), default=1) - 1, len(text)), 0, -1):
        end = text[-size:]
        if any(mark.startswith(end) and mark != end for mark in marks):
            return end
    return b""
