"""Values in Gemma's notation, converted to JSON as they arrive: keys without quotes, strings between marks.

{city:<|"|>Oslo<|"|>,days:3,hourly:false}
"""

from __future__ import annotations

import re
from collections.abc import Generator
from functools import partial

from kvasir.parse import nested
from kvasir.parse.json_text import NUMBER, WORDS, quoted
from kvasir.parse.tape import Emit, Marks, Tape, marks

QUOTE = '<|"|>'
_BRACKETS = {"{": "}", "[": "]"}
PLAIN_KEY = re.compile(r"[^\s:,{}\[\]<]+")  # a key without marks
_KEY = re.compile(rf"(?:{PLAIN_KEY.pattern})?")
_WORD = re.compile(r"[A-Za-z0-9+\-.]*")
_MAX_SCALAR = 512


def container(tape: Tape, emit: Emit, quote: str = QUOTE) -> Generator[None, None, bool]:
    """Consume an object or array, from its opening to its closing bracket; False if something else follows or the text
    ends."""
    if (yield from tape.blank()) not in _BRACKETS:
        return False
    mark = marks(quote, before="")
    return (yield from nested.value(tape, emit, _BRACKETS, partial(_key, mark=mark), partial(_scalar, mark=mark)))


def _key(tape: Tape, emit: Emit, mark: Marks) -> Generator[None, None, bool]:
    if (yield from tape.blank()) == "<":
        return (yield from _string(tape, emit, mark))
    key = (yield from tape.read(_KEY, _MAX_SCALAR)) or ""
    if not key or tape.at_end:
        tape.pos -= len(key)
        return False
    emit(f'"{quoted(key)}"')
    return True


def _scalar(tape: Tape, emit: Emit, mark: Marks) -> Generator[None, None, bool]:
    if (yield from tape.peek()) == "<":
        return (yield from _string(tape, emit, mark))
    word = (yield from tape.read(_WORD, _MAX_SCALAR)) or ""
    text = WORDS.get(word) or (word if NUMBER.fullmatch(word) else None)
    if text is None or tape.at_end:
        tape.pos -= len(word)
        return False
    emit(text)
    return True


def _string(tape: Tape, emit: Emit, mark: Marks) -> Generator[None, None, bool]:
    if not (yield from tape.skip(mark)):
        return False
    emit('"')
    found = yield from tape.until(mark, lambda text: emit(quoted(text)), keep_cut=False)
    if found is None:
        return False
    tape.pos = found.end()
    emit('"')
    return True
