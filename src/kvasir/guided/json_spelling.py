"""Terminals of a grammar as they are spelled inside a string in JSON.

Each character has one spelling, and none is the beginning of another's, so a terminal can be translated piece by piece.
Characters that JSON writes as \\uXXXX, such as U+0001, have none.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable

ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\t": "t", "\n": "n", "\f": "f", "\r": "r"}
_PLAIN = r'[^"\\\x00-\x1f]'  # characters that stand for themselves
_SIGNS = frozenset('\\.+*?()|[]{}^$#&-~/"')  # characters that are escaped
_NAMED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_SHORT = {"d": "", "w": "", "s": "\t\n\f\r"}  # classes, with the characters of ESCAPES that they have
_CODE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[xuU]\{([0-9A-Fa-f]{1,8})\})")
_PROPERTY = re.compile(r"\\p(?:[LNMSZ]|\{[LNMSZ][a-z]?\})")  # of letters, numbers, marks, symbols, separators
_GROUP = re.compile(r"\(\?(?:P?<[A-Za-z_][A-Za-z0-9_]*>|(i|-i)?:)")
_COUNT = re.compile(r"\{[0-9]+(?:,[0-9]*)?\}")


class Unwritable(ValueError):
    """What a terminal has, and its spelling in JSON cannot have."""


def literal(text: str, any_case: bool = False) -> str:
    """The terminal of a text. Raises Unwritable."""
    if any_case:
        return f"/{''.join(map(_character, text))}/i"
    for character in text:
        _check(character)
    return json.dumps(json.dumps(text, ensure_ascii=False)[1:-1]).replace("\x7f", "\\u007f")


def between(first: str, last: str) -> str:
    """The terminal of one character of a range. Raises Unwritable."""
    return f"/{_Reader(f'[{_plain(first)}-{_plain(last)}]', False).translated()}/"


def regex(pattern: str, flags: str = "") -> str:
    """The terminal of a regular expression, in the syntax of Rust's regex crate. Raises Unwritable."""
    if unknown := set(flags) - set("ius"):
        raise Unwritable(f"the flag {min(unknown)!r} of a regular expression is not supported")
    return f"/{_Reader(pattern, 's' in flags).translated()}/{'i' if 'i' in flags else ''}"


def _check(character: str) -> None:
    if character < " " and character not in ESCAPES:
        raise Unwritable(f"the character U+{ord(character):04X} is not supported")


def _character(character: str) -> str:
    """A regular expression for the spelling of one character; it matches in one case."""
    _check(character)
    if character in ESCAPES:
        return rf"(?-i:\\{_plain(ESCAPES[character])})"
    return _plain(character)


def _plain(character: str) -> str:
    """A regular expression for one character as it is, alone or in a class."""
    if character in _SIGNS:
        return "\\" + character
    return character if character.isprintable() else f"\\x{{{ord(character):x}}}"


def _class(items: str, escaped: Iterable[str], negated: bool = False) -> str:
    """The spellings of a class. items: what stands in its brackets. escaped: characters of ESCAPES that it has."""
    has = set(ESCAPES) - set(escaped) if negated else set(escaped)
    plain = f"[[{'^' if negated else ''}{items}]&&{_PLAIN}]" if items else _PLAIN
    ends = "".join(_plain(ESCAPES[character]) for character in ESCAPES if character in has)
    return rf"(?:{plain}|(?-i:\\[{ends}]))" if ends else plain


class _Reader:
    """Reads one regular expression from left to right."""

    def __init__(self, pattern: str, dot_all: bool):
        self._pattern, self._at, self._dot_all = pattern, 0, dot_all

    def translated(self) -> str:
        """Raises Unwritable."""
        pieces: list[str] = []
        repeated = False
        while self._at < len(self._pattern):
            count = self._take(_COUNT)
            if count is not None or self._pattern[self._at] in "*+?":
                if repeated:
                    raise Unwritable("a lazy or possessive repetition is not supported")
                pieces.append(count[0] if count else self._next())
                repeated = True
            else:
                pieces.append(self._piece())
                repeated = False
        return "".join(pieces)

    def _piece(self) -> str:
        if self._pattern[self._at] == "(":
            return self._group()
        if self._pattern[self._at] == "\\":
            return self._escape()
        match character := self._next():
            case ")" | "|":
                return character
            case ".":
                return _class("", (), negated=True) if self._dot_all else _class(r"\n", "\n", negated=True)
            case "[":
                return self._class()
            case "{":
                raise Unwritable("'{' that begins no repetition is not supported")
            case "^" if self._at == 1:
                return ""  # a terminal matches from its beginning
            case "$" if self._at == len(self._pattern):
                return ""  # to its end
            case "^" | "$":
                raise Unwritable(f"the anchor {character!r} is not supported here")
        return _character(character)

    def _group(self) -> str:
        if not self._pattern.startswith("(?", self._at):
            self._at += 1
            return "(?:"
        if found := self._take(_GROUP):
            return f"(?{found[1] or ''}:"
        raise Unwritable(f"the group {self._pattern[self._at : self._at + 4]!r} is not supported")

    def _escape(self) -> str:
        one, items, escaped = self._item()
        return _character(one) if one else _class(items, escaped)

    def _class(self) -> str:
        negated = self._pattern.startswith("^", self._at)
        self._at += negated
        items: list[str] = []
        escaped: set[str] = set()
        while not (items and self._pattern.startswith("]", self._at)):
            one, item, has = self._member()
            if one and self._pattern.startswith("-", self._at) and self._pattern[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last, _, _ = self._member()
                if not one <= last:
                    raise Unwritable(f"the range {one!r} to {last!r} of a class is empty or not one")
                item, has = f"{_plain(one)}-{_plain(last)}", {c for c in ESCAPES if one <= c <= last}
            items.append(item or _plain(one))
            escaped |= {*has, *(ESCAPES.keys() & {one})}
        self._at += 1
        return _class("".join(items), escaped, negated)

    def _member(self) -> tuple[str, str, Iterable[str]]:
        if self._pattern.startswith("\\", self._at):
            return self._item()
        if any(self._pattern.startswith(sign, self._at) for sign in ("[", "&&", "--", "~~")):
            raise Unwritable(f"{self._pattern[self._at : self._at + 2]!r} in a class is not supported")
        return self._next(), "", ()

    def _item(self) -> tuple[str, str, Iterable[str]]:
        """What is escaped: a character, or the items of a class and those of ESCAPES that it has."""
        if found := self._take(_CODE):
            number = int(next(filter(None, found.groups())), 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise Unwritable(f"{found[0]!r} is not a character")
            return chr(number), "", ()
        if found := self._take(_PROPERTY):
            return "", found[0], ()
        self._at += 1
        character = self._next()
        if character in _NAMED:
            return _NAMED[character], "", ()
        if character.lower() in _SHORT:
            has = set(_SHORT[character.lower()])
            return "", "\\" + character, has if character.islower() else ESCAPES.keys() - has
        if character in string.punctuation and character not in "<>":
            return character, "", ()
        raise Unwritable(f"{chr(92) + character!r} in a regular expression is not supported")

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._pattern, self._at)
        if found:
            self._at = found.end()
        return found

    def _next(self) -> str:
        if self._at >= len(self._pattern):
            raise Unwritable("a regular expression ends too early")
        self._at += 1
        return self._pattern[self._at - 1]
