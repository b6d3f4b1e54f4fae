"""JSON text followed to its end as it comes: strings, and objects or arrays of any depth, without a stack."""

from __future__ import annotations

import json
import re
from collections.abc import Generator

from kvasir.parse.tape import Emit, Tape

_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_OUTSIDE = re.compile(r"[\s,:0-9A-Za-z+\-.]*")
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{0,4})?')  # short only at the end of the text
_SCALAR = re.compile(r"[0-9A-Za-z+\-.]*")
_MAX_SCALAR = 64


def quoted(text: str) -> str:
    """A piece of text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def container(tape: Tape, emit: Emit) -> Generator[None, None, bool]:
    """Consume an object or array, from its opening bracket to the one that closes it; False where something
    comes that cannot be JSON, or the text ends."""
    depth = 0
    while True:
        character = yield from tape.take(_OUTSIDE, emit)
        if character == '"':
            if not (yield from string(tape, emit)):
                return False
            continue
        if character not in ("{", "[", "}", "]"):  # "" at the end of the text
            return False
        emit(character)
        tape.pos += 1
        depth += 1 if character in "{[" else -1
        if depth == 0:
            return True


def string(tape: Tape, emit: Emit) -> Generator[None, None, bool]:
    """Consume a string with its quotes; False where the text ends first.

    Two things that models write and JSON forbids are mended: control characters, and backslashes before
    what needs none.
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
    """Consume a value of any kind; False where none comes or the text ends within it."""
    character = yield from tape.peek()
    if character == '"':
        return (yield from string(tape, emit))
    if character in ("{", "["):
        return (yield from container(tape, emit))
    scalar = yield from tape.read(_SCALAR, _MAX_SCALAR)
    if scalar:
        emit(scalar)
    return bool(scalar) and not tape.at_end
