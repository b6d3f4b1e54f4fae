"""The text that a parser has not consumed yet, and the routines that read it.

The routines are generators: they yield when they have to wait for more text, and continue when it has been pushed. A
routine decides only on complete information, so that its decisions do not depend on how the text is divided.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator
from functools import lru_cache

MAX_SPACE = 16  # maximum blank characters before a mark that count as part of it
MAX_HELD = 1 << 16  # maximum characters held back until their meaning is clear

Emit = Callable[[str], None]

_NEVER = r"(?!)"
BLANK = r"[ \t\n\r\f\v]"  # as for bytes, so that tokens and text agree
SPACE = rf"{BLANK}{{0,{MAX_SPACE}}}"


class Marks:
    """Texts to search for; `before` is a regular expression for what may precede each of them."""

    def __init__(self, marks: tuple[str, ...], before: str = SPACE):
        """No mark may contain another: it would be clear too late which of them is meant."""
        whole = "|".join(map(re.escape, marks))
        partial = "|".join(map(_beginnings, marks))
        self.whole = re.compile(f"{before}({whole})" if marks else _NEVER)
        self.partial = re.compile(f"{before}(?:{partial})?\\Z" if marks else _NEVER)
        self.longest = MAX_SPACE + max(map(len, marks), default=0)


@lru_cache(maxsize=512)
def marks(*texts: str, before: str = SPACE) -> Marks:
    return Marks(texts, before)


def _beginnings(mark: str) -> str:
    """A regular expression that matches every non-empty beginning of a mark."""
    pattern = ""
    for character in reversed(mark):
        pattern = f"{re.escape(character)}(?:{pattern})?" if pattern else re.escape(character)
    return pattern


class Tape:
    """`text[pos:]` is still to be consumed. From `hold()` to `release()` the consumed text is kept."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.ended = False
        self._held: int | None = None

    def push(self, text: str) -> None:
        """Appends text; invalidates positions in `text`."""
        start = self.pos if self._held is None else self._held
        self.text = self.text[start:] + text
        self.pos -= start
        self._held = None if self._held is None else 0

    @property
    def at_end(self) -> bool:
        return self.ended and self.pos >= len(self.text)

    # -- holding back --------------------------------------------------------------------------------------

    def hold(self) -> None:
        self._held = self.pos

    def held(self, start: int = 0) -> str:
        """The text consumed since `hold()`, without its first `start` characters."""
        assert self._held is not None
        return self.text[self._held + start : self.pos]

    @property
    def num_held(self) -> int:
        assert self._held is not None
        return self.pos - self._held

    def rewind(self, num_held: int) -> None:
        assert self._held is not None
        self.pos = self._held + num_held

    def release(self) -> str:
        """The text consumed since `hold()`, which is then no longer held; "" if nothing is held."""
        text = "" if self._held is None else self.held()
        self._held = None
        return text

    @property
    def _stop(self) -> int:
        """The position at which held text counts as ended, even if more text follows."""
        return sys.maxsize if self._held is None else self._held + MAX_HELD

    # -- routines ------------------------------------------------------------------------------------------

    def peek(self, count: int = 1) -> Generator[None, None, str]:
        """The next `count` characters, or the fewer that remain."""
        while len(self.text) < min(self.pos + count, self._stop) and not self.ended:
            yield
        return self.text[self.pos : min(self.pos + count, self._stop)]

    def take(self, allowed: re.Pattern[str], emit: Emit) -> Generator[None, None, str]:
        """Emit the text that matches `allowed`, each beginning of which must match too; returns the character
        after it."""
        while True:
            found = allowed.match(self.text, self.pos, self._stop)
            if found and found.end() > self.pos:
                emit(found[0])
                self.pos = found.end()
            if self.pos < len(self.text) or self.ended or self.pos >= self._stop:
                return self.text[self.pos : min(self.pos + 1, self._stop)]
            yield

    def read(self, allowed: re.Pattern[str], limit: int) -> Generator[None, None, str | None]:
        """Consume and return the run of characters that match; None if it is longer than `limit`."""
        while True:
            found = allowed.match(self.text, self.pos)
            end = found.end() if found else self.pos
            if end - self.pos > limit:
                return None
            if end < len(self.text) or self.ended:
                start, self.pos = self.pos, end
                return self.text[start:end]
            yield

    def skip(self, wanted: Marks) -> Generator[None, None, str | None]:
        """Consume and return one of the marks if it comes next; else None."""
        while True:
            found = wanted.whole.match(self.text, self.pos)
            if found:
                self.pos = found.end()
                return found[1]
            if self.ended or not wanted.partial.match(self.text, self.pos):
                return None
            yield

    def until(self, wanted: Marks, emit: Emit, keep_cut: bool = True) -> Generator[None, None, re.Match[str] | None]:
        """Emit the text before the first mark, which is not consumed; None at the end of all text.

        Only a suffix that may be the beginning of a mark is held back. keep_cut: at the end of all text, that suffix is
        text.
        """
        while True:
            found = wanted.whole.search(self.text, self.pos)
            if found:
                cut = found.start()
            elif self.ended and keep_cut:
                cut = len(self.text)
            else:
                partial = wanted.partial.search(self.text, max(self.pos, len(self.text) - wanted.longest))
                cut = partial.start() if partial else len(self.text)
            if cut > self.pos:
                emit(self.text[self.pos : cut])
                self.pos = cut
            if found or self.ended:
                return found
            yield

    def before(self, wanted: Marks, limit: int) -> Generator[None, None, bool]:
        """Consume the text before the first mark, if a mark comes within `limit` characters."""
        while True:
            found = wanted.whole.search(self.text, self.pos, self.pos + limit + wanted.longest)
            if found and found.start() - self.pos <= limit:
                self.pos = found.start()
                return True
            if self.ended or len(self.text) - self.pos >= limit + wanted.longest:
                return False
            yield

    def is_next(self, wanted: Marks) -> Generator[None, None, bool]:
        """Whether one of the marks, or the end of all text, comes next. Only valid while text is held."""
        consumed = self.num_held
        found = yield from self.skip(wanted)
        self.rewind(consumed)
        return found is not None or (self.ended and not self.text[self.pos :].strip())

    def cut(self, *texts: str) -> bool:
        """At the end of all text: consume the beginning of one of these marks. Call it after a `skip` of them, which
        waits for the text."""
        rest = self.text[self.pos :].lstrip()
        if not self.ended or not rest or not any(text.strip().startswith(rest) for text in texts):
            return False
        self.pos = len(self.text)
        return True

    def blank(self) -> Generator[None, None, str]:
        """Consume blank characters; returns the character after them."""
        return (yield from self.take(_BLANK, nothing))

    def comma_or(self, closing: str) -> Generator[None, None, bool]:
        """Consume blank characters and a comma, or the blank characters before `closing`; False if neither follows."""
        character = yield from self.blank()
        if character == ",":
            self.pos += 1
        return character in (",", closing)


_BLANK = re.compile(f"{BLANK}*")


def nothing(text: str) -> None:
    """An `Emit` that drops its text."""
