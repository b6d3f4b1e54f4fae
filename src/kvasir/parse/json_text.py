"""Incremental parsing of JSON text to its end: strings, and values of any depth, without recursion."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from enum import Enum, auto

from kvasir.parse.tape import Emit, Tape, marks

_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{0,4})?')  # incomplete only at the end of the text
_BLANKS = re.compile(r"[ \t\n\r]*")
_SCALAR = re.compile(r"[0-9A-Za-z+\-.]*")
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_MAX_SCALAR = 512
_CLOSING = {"{": "}", "[": "]"}
_TRAILING = {bracket: marks(bracket, before=r",[ \t\n\r]{0,16}") for bracket in "}]"}


class _Want(Enum):
    """The grammar element that may come next."""

    VALUE = auto()
    FIRST = auto()  # the first member, or the closing bracket
    KEY = auto()
    COLON = auto()
    NEXT = auto()  # a comma, or the closing bracket


def quoted(text: str) -> str:
    """A piece of text in the notation of a JSON string, without quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def string(tape: Tape, emit: Emit) -> Generator[None, None, bool]:
    """Consume a string with its quotes; False if the text ends first.

    Corrects two common mistakes of models: control characters, and backslashes before characters that need none.
    """
    emit('"')
    tape.pos += 1
    while True:
        character = yield from tape.take(_IN_STRING, emit)
        if character == "":
            return False
        if character == '"':
            emit('"')
            tape.pos += 1
            return True
        if character != "\\":
            emit(quoted(character))
            tape.pos += 1
            continue
        escape = yield from tape.peek(2)
        if escape == "\\u":
            escape = yield from tape.peek(6)
        if _ESCAPE.fullmatch(escape):
            emit(escape)
            tape.pos += len(escape)
        else:
            emit("\\\\")
            tape.pos += 1


def value(tape: Tape, emit: Emit) -> Generator[None, None, bool]:
    """Consume a value of any kind and emit its text as it arrives; False if something other than JSON follows, or the
    text ends. The emitted text is then the beginning of a value.

    Corrects two common mistakes of models: a comma before a closing bracket is dropped, and Python's True, False and
    None become JSON.
    """
    closing: list[str] = []  # the brackets still open
    want = _Want.VALUE
    while True:
        character = yield from tape.take(_BLANKS, emit)
        if want in (_Want.FIRST, _Want.NEXT) and (yield from _closes(tape, closing[-1], want)):
            emit(closing.pop())
            want = _Want.NEXT
        elif (want, character) in ((_Want.NEXT, ","), (_Want.COLON, ":")):
            emit(character)
            tape.pos += 1
            want = _Want.KEY if character == "," and closing[-1] == "}" else _Want.VALUE
        elif character == '"' and want not in (_Want.NEXT, _Want.COLON):
            if not (yield from string(tape, emit)):
                return False
            is_key = want is _Want.KEY or (want is _Want.FIRST and closing[-1] == "}")
            want = _Want.COLON if is_key else _Want.NEXT
        elif want is not _Want.VALUE and (want is not _Want.FIRST or closing[-1] == "}"):
            return False
        elif character in _CLOSING:
            emit(character)
            tape.pos += 1
            closing.append(_CLOSING[character])
            want = _Want.FIRST
        elif (yield from _scalar(tape, emit)):
            want = _Want.NEXT
        else:
            return False
        if not closing and want is _Want.NEXT:
            return True


def _closes(tape: Tape, bracket: str, want: _Want) -> Generator[None, None, bool]:
    """Consume the closing bracket, if it comes next; after a member also a comma before it."""
    if (yield from tape.peek()) == bracket:
        tape.pos += 1
        return True
    return want is _Want.NEXT and (yield from tape.skip(_TRAILING[bracket])) is not None


def _scalar(tape: Tape, emit: Emit) -> Generator[None, None, bool]:
    word = (yield from tape.read(_SCALAR, _MAX_SCALAR)) or ""
    text = WORDS.get(word) or (word if NUMBER.fullmatch(word) else None)
    if text is not None:
        emit(text)
        return not tape.at_end
    if tape.at_end and word and _begins_scalar(word):
        emit(word)
    else:
        tape.pos -= len(word)
    return False


def _begins_scalar(word: str) -> bool:
    return any(map(NUMBER.fullmatch, (word + "0", word + "+0"))) or any(w.startswith(word) for w in WORDS.values())
