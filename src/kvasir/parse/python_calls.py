"""Calls in Python syntax: [name(key=value, ...), ...]"""

from __future__ import annotations

import re
from collections.abc import Generator

from kvasir.parse import json_text, python_text
from kvasir.parse.emitter import MAX_NAME, Emitter, ParseRoutine
from kvasir.parse.tape import marks

MAX_KEY = 256

_IDENTIFIER = re.compile(r"(?:[A-Za-z_][\w.\-]*)?")
_KEYWORD = re.compile(r"(?:[^\W\d]\w*)?")


def python_calls(emitter: Emitter, bare: bool) -> ParseRoutine:
    """Parses from the mark, or from the opening bracket if `bare`."""
    tape, calls = emitter.tape, emitter.calls
    if not bare:
        yield from tape.skip(marks(*calls.begins))
        yield from tape.skip(marks(*calls.fence[:1]))
    is_list = bool((yield from tape.skip(marks("["))))
    if bare and not is_list:
        return
    some = False
    while True:
        yield from tape.blank()
        name = yield from tape.read(_IDENTIFIER, MAX_NAME)
        if not name or not emitter.is_name(name) or (yield from tape.peek()) != "(":
            break
        tape.pos += 1
        emitter.start(name)
        whole = yield from _keywords(emitter)
        emitter.end()
        if not whole:
            return
        some = True
        tape.hold()
        yield from tape.skip(marks(","))
    if some:
        tape.rewind(0)
        yield from emitter.closed("]" if is_list else "", *calls.fence[1:], *calls.ends)


def _keywords(emitter: Emitter) -> Generator[None, None, bool]:
    """key=value, ... and the closing parenthesis; False if they break off, with the text of an incomplete key still
    held."""
    tape = emitter.tape
    emitter.arguments("{")
    separator = ""
    while (yield from tape.blank()) != ")":
        tape.hold()
        key = yield from tape.read(_KEYWORD, MAX_KEY)
        if not key or (yield from tape.blank()) != "=":
            return False
        tape.release()
        tape.pos += 1
        emitter.arguments(f'{separator}"{json_text.quoted(key)}": ')
        separator = ", "
        yield from tape.blank()
        if not (yield from python_text.value(tape, emitter.arguments)):
            return False
        if not (yield from tape.comma_or(")")):
            return False
    tape.pos += 1
    emitter.arguments("}")
    return True
