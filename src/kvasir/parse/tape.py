"""The text that a parser has not consumed yet, and the steps over it.

The steps are generators: they yield where they have to wait for more text, and go on when it has been pushed.
A step decides only on what it has seen whole, so that what it decides does not depend on how the text was cut.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator
from functools import lru_cache

MAX_SPACE = 16  # blank characters before a mark that count as a part of it
MAX_HELD = 1 << 16  # characters that are held back at most, until it is clear what they are

Emit = Callable[[str], None]

_NEVER = r"(?!)"
BLANK = r"[ \t\n\r\f\v]"  # as bytes know it, so that tokens tell it as text does
SPACE = rf"{BLANK}{{0,{MAX_SPACE}}}"


class Marks:
    """Texts to be looked for, each with what may stand `before` it (a regular expression)."""

    def __init__(self, marks: tuple[str, ...], before: str = SPACE):
        """No mark may lie inside another one: which of them is meant would be seen too late."""
        whole = "|".join(map(re.escape, marks))
        partial = "|".join(map(_beginnings, marks))
        self.whole = re.compile(f"{before}({whole})" if marks else _NEVER)
        self.partial = re.compile(f"{before}(?:{partial})?\\Z" if marks else _NEVER)
        self.longest = MAX_SPACE + max(map(len, marks), default=0)


@lru_cache(maxsize=512)
def marks(*texts: str, before: str = SPACE) -> Marks:
    return Marks(texts, before)


def _beginnings(mark: str) -> str:
    """A regular expression for every beginning of a mark but the empty one."""
    pattern = ""
    for character in reversed(mark):
        pattern = f"{re.escape(character)}(?:{pattern})?" if pattern else re.escape(character)
    return pattern


class Tape:
    """`text[pos:]` is still to be consumed. From `hold()` to `release()` the text consumed is kept."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.ended = False
        self._held: int | None = None

    def push(self, text: str) -> None:
        """Positions in `text` are valid until here."""
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
        """The text consumed since `hold()`, which is kept no longer; "" where nothing is held."""
        text = "" if self._held is None else self.held()
        self._held = None
        return text

    @property
    def _stop(self) -> int:
        """Where text that is held counts as ended, however much follows."""
        return sys.maxsize if self._held is None else self._held + MAX_HELD

    # -- steps ---------------------------------------------------------------------------------------------

    def peek(self, count: int = 1) -> Generator[None, None, str]:
        """The next `count` characters, or the fewer that are left."""
        while len(self.text) < min(self.pos + count, self._stop) and not self.ended:
            yield
        return self.text[self.pos : min(self.pos + count, self._stop)]

    def take(self, allowed: re.Pattern[str], emit: Emit) -> Generator[None, None, str]:
        """Hand over what matches, whose every beginning has to match too; returns the character after it."""
        while True:
            found = allowed.match(self.text, self.pos, self._stop)
            if found and found.end() > self.pos:
                emit(found[0])
                self.pos = found.end()
            if self.pos < len(self.text) or self.ended or self.pos >= self._stop:
                return self.text[self.pos : min(self.pos + 1, self._stop)]
            yield

    def read(self, allowed: re.Pattern[str], limit: int) -> Generator[None, None, str | None]:
        """The run of characters that match, consumed; None if it is longer than `limit`."""
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
        """Consume one of the marks if it comes next; returns it."""
        while True:
            found = wanted.whole.match(self.text, self.pos)
            if found:
                self.pos = found.end()
                return found[1]
            if self.ended or not wanted.partial.match(self.text, self.pos):
                return None
            yield

    def until(self, wanted: Marks, emit: Emit, keep_cut: bool = True) -> Generator[None, None, re.Match[str] | None]:
        """Hand over the text before the first mark, which is not consumed; None at the end of all text.

        Held back is only the end that may turn out to begin a mark. keep_cut: it is text where all text ends with it.
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
        """Consume the text before the first mark, if one comes within `limit` characters."""
        while True:
            found = wanted.whole.search(self.text, self.pos, self.pos + limit + wanted.longest)
            if found and found.start() - self.pos <= limit:
                self.pos = found.start()
                return True
            if self.ended or len(self.text) - self.pos >= limit + wanted.longest:
                return False
            yield

    def is_next(self, wanted: Marks) -> Generator[None, None, bool]:
        """Whether one of the marks, or the end of all text, comes next. Only while text is held."""
        consumed = self.num_held
        found = yield from self.skip(wanted)
        self.rewind(consumed)
        return found is not None or (self.ended and not self.text[self.pos :].strip())

    def cut(self, *texts: str) -> bool:
        """At the end of all text: consume the beginning of one of these marks. After a `skip` of them, which waits."""
        rest = self.text[self.pos :].lstrip()
        if not self.ended or not rest or not any(text.strip().startswith(rest) for text in texts):
            return False
        self.pos = len(self.text)
        return True

    def blank(self) -> Generator[None, None, str]:
        """Consume blank characters; returns the character after them."""
        return (yield from self.take(_BLANK, nothing))

    def comma_or(self, closing: str) -> Generator[None, None, bool]:
        """Consume blank characters and a comma, or those before `closing`; False where neither comes."""
        character = yield from self.blank()
        if character == ",":
            self.pos += 1
        return character in (",", closing)


_BLANK = re.compile(f"{BLANK}*")


def nothing(text: str) -> None:
    """An `Emit` for text that says nothing."""
