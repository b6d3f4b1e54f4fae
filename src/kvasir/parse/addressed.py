"""Outputs that are messages to recipients, where a call is a message to a function (Functionary 3.2).

    >>>all
    TEXT>>>NAME
    {...}>>>NAME
    {...}

The prompt contains the first mark.
"""

from __future__ import annotations

import re

from kvasir.parse import json_text
from kvasir.parse.tape import marks
from kvasir.parse.telling import MAX_NAME, Steps, Telling

EVERYONE = "all"

_NAME = re.compile(r"[^\s<>{}()\[\]\"'`,;=]*")


def addressed(tell: Telling, bare: bool) -> Steps:
    """Parses from the mark, or from the name if the prompt contains the mark. Only names of known functions count,
    since ordinary text can contain such marks too."""
    tape = tell.tape
    tell.known = True
    yield from tape.skip(marks(*tell.calls.begins))
    mark_size = tape.num_held
    name = yield from tape.read(_NAME, MAX_NAME)
    ends = (yield from tape.peek()) == "\n" if name else False
    if ends and name == EVERYONE:
        tape.pos += 1
        tape.hold()
    elif name and ends and tell.is_name(name) and (yield from tape.blank()) == "{":
        tell.start(name)
        yield from json_text.value(tape, tell.arguments)
        tell.end()
        tape.hold()
    else:
        tape.rewind(mark_size)
