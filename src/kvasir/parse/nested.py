"""Objects and arrays in any notation of brackets, commas and colons, converted to JSON as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping

from kvasir.parse.tape import Emit, Tape

MAX_DEPTH = 512
Read = Callable[[Tape, Emit], Generator[None, None, bool]]  # False if something else follows or the text ends


def value(tape: Tape, emit: Emit, brackets: Mapping[str, str], key: Read, scalar: Read) -> Generator[None, None, bool]:
    """Consume one value; False if something else follows or the text ends.

    brackets: maps opening to closing brackets; all but { } are arrays. key, scalar: readers of keys and scalars in the
    notation.
    """
    closing: list[str] = []  # the brackets still open
    fresh = False  # directly after an opening bracket: no comma before the next element
    while True:
        character = yield from tape.blank()
        if closing and character == closing[-1]:
            closing.pop()
            tape.pos += 1
            emit("}" if character == "}" else "]")
        else:
            if closing and not fresh:
                emit(", ")
            if closing and closing[-1] == "}" and not (yield from _member(tape, emit, key)):
                return False
            character = yield from tape.blank()
            if character in brackets and len(closing) < MAX_DEPTH:
                closing.append(brackets[character])
                tape.pos += 1
                emit("{" if character == "{" else "[")
                fresh = True
                continue
            if not (yield from scalar(tape, emit)):
                return False
        fresh = False
        if not closing:
            return True
        if not (yield from tape.comma_or(closing[-1])):
            return False


def _member(tape: Tape, emit: Emit, key: Read) -> Generator[None, None, bool]:
    """A key and the colon after it."""
    if not (yield from key(tape, emit)) or (yield from tape.blank()) != ":":
        return False
    tape.pos += 1
    emit(": ")
    return True
