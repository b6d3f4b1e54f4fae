"""Outputs that are messages to recipients, where a call is a message to a function.

    >>>all                     Functionary 3.2
    TEXT>>>NAME
    {...}>>>NAME
    {...}

    NAME                       GLM-4, whose text has no recipient
    {...}<|assistant|>NAME
    {...}

The prompt contains the first mark.
"""

from __future__ import annotations

import re

from kvasir.parse import json_text
from kvasir.parse.emitter import MAX_NAME, Emitter, ParseRoutine
from kvasir.parse.tape import marks

_NAME = re.compile(r"[^\s<>{}()\[\]\"'`,;=]*")


def addressed(emitter: Emitter, bare: bool) -> ParseRoutine:
    """Parses from the mark, or from the name if the prompt contains the mark. Only names of known functions count,
    since ordinary text can contain such marks too."""
    tape = emitter.tape
    emitter.known = True
    yield from tape.skip(marks(*emitter.calls.begins))
    mark_size = tape.num_held
    name = yield from tape.read(_NAME, MAX_NAME)
    ends = (yield from tape.peek()) == "\n" if name else False
    if ends and name == emitter.calls.everyone:
        tape.pos += 1
        tape.hold()
    elif name and ends and emitter.is_name(name) and (yield from tape.blank()) == "{":
        emitter.start(name)
        yield from json_text.value(tape, emitter.arguments)
        emitter.end()
        tape.hold()
    else:
        tape.rewind(mark_size)
