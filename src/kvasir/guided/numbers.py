"""Ends numbers in JSON where a double or a 64-bit integer cannot hold more digits.

The library's numbers are unbounded, and small models may write endless digits. Of the tokens that a grammar allows,
those that would give a number more digits, or a larger exponent, than fit are removed. If nothing else may follow,
because a schema requires more digits, all tokens stay.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

INTEGER_DIGITS = 20  # as many as 2^64 - 1 has
FRACTION_DIGITS = 20
EXPONENT_DIGITS = 3
MOST_BYTES = 64  # of a number that are kept; a number that fits is shorter
_NUMBER = re.compile(rb"(-?)(\d+)(?:\.(\d*))?(?:[eE][+-]?(\d*))?")
_LETTERS = b"0123456789+-.eE"
_TEXT = (b'"', b"q", b"z")  # if one of them may follow, the position is inside a text


def fits(number: bytes) -> bool:
    """Whether a number may begin with these bytes; also true if they are not a number."""
    found = _NUMBER.fullmatch(number)
    if found is None:
        return True
    sign, whole, fraction, exponent = found.groups()
    if len(whole) > INTEGER_DIGITS or int(whole) > (1 << 63 if sign else (1 << 64) - 1):
        return False
    if len(fraction or b"") > FRACTION_DIGITS or len(exponent or b"") > EXPONENT_DIGITS:
        return False
    return not exponent or math.isfinite(float(number))


class NumberLimits:
    """State that all sequences over one vocabulary share. Masks are integers: bit i allows id i."""

    def __init__(self, tokens: Sequence[tuple[int, bytes]], token_bytes: Callable[[int], bytes]):
        """tokens: all ids that stand for bytes, with their bytes."""
        self.token_bytes = token_bytes
        leads = [(i, data[: len(data) - len(data.lstrip(_LETTERS))]) for i, data in tokens]
        self._digits = sorted(((i, lead) for i, lead in leads if lead.isdigit()), key=lambda one: -len(one[1]))
        self._others: dict[bytes, list[int]] = {}  # thousands of tokens share a few leads
        for i, lead in leads:
            if lead and not lead.isdigit():
                self._others.setdefault(lead, []).append(i)
        self._text = sum(1 << i for i, data in tokens if data in _TEXT)
        self.beyond = lru_cache(64)(self._beyond)

    def state(self, grammar: str) -> NumberState | None:
        """The state of a sequence that follows a grammar; None if the grammar has no JSON."""
        has_json = '"json_schema": {' in grammar or "%json" in grammar
        return NumberState(self) if has_json else None

    def bounded(self, mask: int, number: bytes) -> int:
        """The mask without the ids that cannot continue `number`, the bytes of a number so far."""
        left = mask & ~self.beyond(number)
        return left if left and not mask & self._text else mask

    def _beyond(self, number: bytes) -> int:
        if _NUMBER.fullmatch(number) is None:
            return 0
        beyond = [i for lead, ids in self._others.items() if not fits(number + lead) for i in ids]
        for i, lead in self._digits:  # longest first
            if not fits(number + lead):
                beyond.append(i)
            elif b"e" not in number.lower() and len(lead) + len(number) < INTEGER_DIGITS:
                break  # shorter leads fit as well
        bits = bytearray(max(beyond, default=0) // 8 + 1)
        for i in beyond:
            bits[i >> 3] |= 1 << (i & 7)
        return int.from_bytes(bits, "little")


class NumberState:
    """State of one sequence: the bytes of a number at the end of its text.

    Quotation marks show whether the text is inside a JSON string, which ends with its line at the latest; the ids that
    may follow show it, too.
    """

    __slots__ = ("_escaped", "_numbers", "_quoted", "_text")

    def __init__(self, numbers: NumberLimits):
        self._numbers = numbers
        self._quoted = self._escaped = False
        self._text = b""

    def copy(self) -> NumberState:
        other = NumberState(self._numbers)
        other._quoted, other._escaped, other._text = self._quoted, self._escaped, self._text
        return other

    def feed(self, ids: Iterable[int]) -> None:
        for token in ids:
            text = self._text + self._numbers.token_bytes(token)
            self._follow(text[len(self._text) :])
            self._text = text[len(text.rstrip(_LETTERS)) :][-MOST_BYTES:]

    def bounded(self, mask: bytes) -> bytes:
        if self._quoted or not self._numbers.beyond(self._text):
            return mask
        return self._numbers.bounded(int.from_bytes(mask, "little"), self._text).to_bytes(len(mask), "little")

    def _follow(self, data: bytes) -> None:
        for byte in data:
            if byte == ord("\n"):
                self._quoted = self._escaped = False
            elif self._escaped:
                self._escaped = False
            elif byte == ord("\\"):
                self._escaped = self._quoted
            elif byte == ord('"'):
                self._quoted = not self._quoted
