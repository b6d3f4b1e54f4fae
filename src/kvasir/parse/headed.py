"""Calls with a head that names the function, followed by arguments: an object, or parameters between marks."""

from __future__ import annotations

import re
from collections.abc import Generator

from kvasir.parse import json_text, marked_text, values
from kvasir.parse.emitter import Emitter, ParseRoutine
from kvasir.parse.format import Style
from kvasir.parse.tape import MAX_HELD, Emit, marks

MAX_HEAD = 1024  # characters from a call's mark to its arguments
MAX_KEY = 256


def headed(emitter: Emitter, bare: bool) -> ParseRoutine:
    """Parses from the mark."""
    tape, calls, parameters = emitter.tape, emitter.calls, emitter.calls.parameters
    yield from tape.skip(marks(*calls.begins))
    mark_size = tape.num_held
    if calls.begins[1:]:  # the first mark may open all calls; the mark of one call follows then
        yield from tape.skip(marks(*calls.begins[1:]))
    arguments = marks(parameters.key_begin if parameters else "{", *calls.ends[:1])
    found = yield from tape.before(arguments, MAX_HEAD)
    head = re.fullmatch(calls.head, tape.held().strip()) if found else None
    if head is None or not emitter.is_name(head["name"].strip()):
        tape.rewind(mark_size)
        return
    name, id = head["name"].strip(), head.groupdict().get("id")
    emitter.start(name, id if id and id.isprintable() and len(id) <= MAX_HEAD else None)
    if parameters:
        whole = yield from _parameters(emitter, name)
    elif (yield from tape.blank()) == "{":
        if calls.style is Style.MARKED:
            whole = yield from marked_text.container(tape, emitter.arguments, calls.quote)
        else:
            whole = yield from json_text.value(tape, emitter.arguments)
    else:
        emitter.arguments("{}")
        whole = True
    emitter.end()
    if whole:
        tape.hold()
        yield from emitter.closed(*calls.fence, *calls.ends[bool(parameters) :])


def _parameters(emitter: Emitter, name: str) -> Generator[None, None, bool]:
    """Parameters between marks, up to and including the mark that closes the call; False if they break off, with the
    text of an incomplete parameter still held."""
    tape, parameters = emitter.tape, emitter.calls.parameters
    assert parameters is not None
    schema = emitter.tools.get(name) if emitter.tools else None
    emitter.arguments("{")
    separator = ""
    tape.hold()
    while not (yield from tape.skip(marks(emitter.calls.ends[0]))):
        if not (yield from tape.skip(marks(parameters.key_begin))):
            if tape.cut(emitter.calls.ends[0], parameters.key_begin):
                tape.release()
            return False
        key_start = tape.num_held
        if not (yield from tape.before(marks(parameters.key_end, before=""), MAX_KEY)):
            tape.rewind(0)
            if tape.cut(emitter.calls.ends[0]):  # its beginning may match that of a key
                tape.release()
            else:
                tape.rewind(key_start)
            return False
        key = tape.held(key_start).strip()
        yield from tape.skip(marks(parameters.key_end, before=""))
        types = values.types_of(schema, key)
        if parameters.kinds:
            if (kind := (yield from tape.skip(marks(*parameters.kinds, before="")))) is None:
                return False
            types = values.STRING if kind == parameters.kinds[0] else values.JSON
        if parameters.value_begin and not (yield from tape.skip(marks(parameters.value_begin))):
            return False
        tape.release()
        emitter.arguments(f'{separator}"{json_text.quoted(key)}": ')
        separator = ", "
        if not (yield from _value(emitter, key, types)):
            return False
        tape.hold()
    tape.release()
    emitter.arguments("}")
    return True


def _value(emitter: Emitter, key: str, types: frozenset[str]) -> Generator[None, None, bool]:
    """A parameter's value with the mark after it; False if the text ends first. A string is emitted as it arrives, any
    other value at its end; a value too long to hold becomes a string."""
    tape, parameters = emitter.tape, emitter.calls.parameters
    assert parameters is not None
    value = _Value(types, parameters.tags, emitter.arguments)
    end = parameters.value_end.replace("{key}", key)
    if parameters.lines and (yield from tape.peek()) == "\n":
        tape.pos += 1
    elif parameters.wrap[0] and (yield from tape.skip(marks(parameters.wrap[0], before=""))):
        end = parameters.wrap[1] + end
    closing = marks(end, before=r"\n?" if parameters.lines else "")
    while found := (yield from tape.until(closing, value.add)):
        tape.hold()
        tape.pos = found.end()
        if (yield from _follows(emitter)):
            tape.release()
            value.close()
            return True
        value.add(tape.release())  # the value itself contains this mark
    value.break_off()
    return False


def _follows(emitter: Emitter) -> Generator[None, None, bool]:
    """Whether the next parameter or the end of the call follows, or a beginning of either in truncated output."""
    key_begin = emitter.calls.parameters.key_begin if emitter.calls.parameters else ""
    if (yield from emitter.tape.is_next(marks(emitter.calls.ends[0]))):
        return True
    consumed = emitter.tape.num_held
    cut = emitter.tape.cut(emitter.calls.ends[0], key_begin)
    emitter.tape.rewind(consumed)
    if cut:
        return True
    if key_begin.endswith("<") and (yield from emitter.tape.is_next(marks(key_begin + "/"))):
        return False  # where keys are tags: the end of a tag around the value
    return (yield from emitter.tape.is_next(marks(key_begin)))


class _Value:
    """Converts the text of a parameter to JSON."""

    def __init__(self, types: frozenset[str], tags: str, emit: Emit):
        self._types = types
        self._tags = tags
        self._emit = emit
        self._size = 0
        self._pieces: list[str] = []
        self._is_string = types == values.STRING
        if self._is_string:
            emit('"')

    def add(self, text: str) -> None:
        self._size += len(text)
        if not self._is_string:
            self._pieces.append(text)
            if self._size > MAX_HELD:
                self._as_string()
        else:
            self._emit(json_text.quoted(text))

    def _as_string(self) -> None:
        self._is_string = True
        self._emit('"' + json_text.quoted("".join(self._pieces)))
        self._pieces.clear()

    def close(self) -> None:
        if self._is_string:
            self._emit('"')
            return
        text = "".join(self._pieces)
        nested = values.from_tags(text, self._tags) if self._tags else None
        self._emit(values.to_json(text, self._types) if nested is None else nested)

    def break_off(self) -> None:
        """The end of the value is missing: emit the text so far, as a string without its closing quote."""
        if not self._is_string:
            self._as_string()
