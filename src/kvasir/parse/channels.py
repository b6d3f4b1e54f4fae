"""Outputs that are messages with headers, where a call is a message to a function (harmony)."""

from __future__ import annotations

import re

from kvasir.parse import json_text
from kvasir.parse.emitter import Emitter, ParseRoutine
from kvasir.parse.tape import Emit, Tape, marks

MAX_HEADER = 1024

_HEADER_BEGINS = marks("<|start|>", "<|channel|>", "to=")
_HEADER_ENDS = marks("<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|start|>")
_MESSAGE_MARKS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_MESSAGE_ENDS = marks(*_MESSAGE_MARKS, before="")
_ARGUMENTS = marks("{", "<|call|>", "<|end|>")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def messages(emitter: Emitter, calls: bool, thinks: bool) -> ParseRoutine:
    """<|start|>ROLE to=RECIPIENT<|channel|>CHANNEL TYPE<|message|>TEXT<|end|>, repeated. The prompt contains the first
    role. Text without a header is content. thinks: the channel `analysis` is reasoning."""
    tape = emitter.tape
    while (yield from tape.peek()):
        tape.hold()
        header = ""
        if (yield from tape.skip(_HEADER_BEGINS)) and (yield from tape.before(_HEADER_ENDS, MAX_HEADER)):
            text = tape.held()
            header = text if (yield from tape.skip(marks("<|message|>"))) else ""
        if not header:
            emitter.content(tape.release())
            yield from _message(tape, emitter.content)
            continue
        recipient = _RECIPIENT.search(header)
        if calls and recipient and emitter.is_name(recipient[1]) and (yield from tape.is_next(_ARGUMENTS)):
            emitter.start(recipient[1])
            if (yield from tape.blank()) == "{":
                yield from json_text.value(tape, emitter.arguments)
            else:
                emitter.arguments("{}")
            emitter.end()
            yield from tape.blank()
            tape.hold()
            if not (yield from tape.is_next(_MESSAGE_ENDS)):
                tape.cut(*_MESSAGE_MARKS)
            tape.release()
            yield from _message(tape, emitter.content)
        else:
            tape.release()
            channel = _CHANNEL.search(header)
            is_thought = thinks and channel is not None and channel[1] == "analysis"
            yield from _message(tape, emitter.reasoning if is_thought else emitter.content)


def _message(tape: Tape, emit: Emit) -> ParseRoutine:
    found = yield from tape.until(_MESSAGE_ENDS, emit)
    if found and found[1] != "<|start|>":
        tape.pos = found.end()
