"""Ends a completion of code by its lines, as llama.cpp does."""

from __future__ import annotations

import time
from collections.abc import Callable


class Lines:
    """The lines of one choice. indent: every line from the second on must begin with at least `indent` blanks,
    otherwise the choice ends there. seconds: counted from the first token; after them, the choice ends at the next
    token that follows a line break."""

    def __init__(self, indent: int = 0, seconds: float | None = None, clock: Callable[[], float] = time.monotonic):
        self._indent = indent
        self._seconds = seconds
        self._clock = clock
        self._begun: float | None = None
        self._depth: int | None = None  # blanks of the current line while it has nothing else
        self.broken = False  # whether there was a line break
        self.ended = False

    def push(self, text: str) -> str:
        """The part of the text that belongs to the choice."""
        if self._begun is None:
            self._begun = self._clock()
        kept = self._indented(text) if self._indent else text
        self.broken = self.broken or "\n" in kept
        if self._seconds is not None and self.broken and self._clock() - self._begun > self._seconds:
            self.ended = True
        return kept

    def _indented(self, text: str) -> str:
        for i, character in enumerate(text):
            if self._depth is not None and character in " \t":
                self._depth += 1
                continue
            if self._depth is not None and self._depth < self._indent:
                self.ended = True
                return text[:i]
            self._depth = 0 if character == "\n" else None
        return text
