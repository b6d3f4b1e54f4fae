"""Python literals, as in calls in Python syntax, converted to JSON as they arrive."""

from __future__ import annotations

import re
from collections.abc import Generator

from kvasir.parse import nested
from kvasir.parse.json_text import NUMBER, WORDS, quoted
from kvasir.parse.tape import Emit, Tape

_WORD = re.compile(r"[A-Za-z]*")
_NUMBER_TEXT = re.compile(r"[0-9eE+\-._]*")
_MAX_SCALAR = 512
_BRACKETS = {"[": "]", "(": ")", "{": "}"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_ESCAPES |= {character: character for character in "\\'\""}


def value(tape: Tape, emit: Emit) -> Generator[None, None, bool]:
    """Consume one literal; False if something else follows or the text ends. Tuples become arrays."""
    return (yield from nested.value(tape, emit, _BRACKETS, _key, _scalar))


def _key(tape: Tape, emit: Emit) -> Generator[None, None, bool]:
    return (yield from tape.blank()) in ("'", '"') and (yield from _string(tape, emit))


def _scalar(tape: Tape, emit: Emit) -> Generator[None, None, bool]:
    character = yield from tape.peek()
    if character in ("'", '"'):
        return (yield from _string(tape, emit))
    is_word = character.isalpha()
    written = (yield from tape.read(_WORD if is_word else _NUMBER_TEXT, _MAX_SCALAR)) or ""
    if is_word:
        text = WORDS.get(written) or (_begun(written) if tape.at_end else None)
    else:
        text = _number(written, tape.at_end)
    if text is None:
        tape.pos -= len(written)
        return False
    emit(text)
    return not tape.at_end


def _begun(word: str) -> str | None:
    """The incomplete name of a constant at the end of truncated output, as the beginning of its JSON name."""
    return next((WORDS[name][: len(word)] for name in WORDS if word and name.startswith(word)), None)


def _number(written: str, cut: bool) -> str | None:
    """The number in JSON notation: no digit separators, no plus sign, digits on both sides of the point. cut: it may be
    incomplete, and so may the result."""
    text = written.replace("_", "").removeprefix("+")
    text = re.sub(r"^(-?)\.", r"\g<1>0.", text)
    text = re.sub(r"\.(?=[^0-9])" if cut else r"\.(?![0-9])", ".0", text)
    if NUMBER.fullmatch(text) or (cut and written and NUMBER.fullmatch(text + "0")):
        return text
    return None


def _string(tape: Tape, emit: Emit) -> Generator[None, None, bool]:
    """A string in either kind of quotes, single or triple."""
    quote = yield from tape.peek(3)
    if quote != quote[0] * 3:
        quote = quote[0]
    tape.pos += len(quote)
    emit('"')
    plain = _PLAIN[quote[0]]
    while True:
        character = yield from tape.take(plain, lambda text: emit(quoted(text)))
        if character == "":
            return False
        if character == "\\":
            if not (yield from _escape(tape, emit)):
                return False
        elif (yield from tape.peek(len(quote))) == quote:
            tape.pos += len(quote)
            emit('"')
            return True
        else:
            tape.pos += 1
            emit(quoted(character))


_PLAIN = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}


def _escape(tape: Tape, emit: Emit) -> Generator[None, None, bool]:
    kind = (yield from tape.peek(2))[1:]
    size = {"x": 2, "u": 4, "U": 8}.get(kind, 0)
    escape = yield from tape.peek(2 + size)
    if len(escape) < 2 + size or not kind:
        return False
    tape.pos += 2 + size
    digits = escape[2:]
    if size and re.fullmatch(r"[0-9a-fA-F]+", digits) and int(digits, 16) <= 0x10FFFF:
        code = int(digits, 16)
        # A lone surrogate is not a character: it stays an escape, which JSON has too.
        emit(f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else quoted(chr(code)))
    elif size:
        emit(quoted(escape[:2]))
        tape.pos -= size
    else:
        emit(quoted(_ESCAPES.get(kind, escape)))
    return True
