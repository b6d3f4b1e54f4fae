"""Calls that are JSON objects with a name and arguments: one object or a list."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator

from kvasir.parse import json_text
from kvasir.parse.emitter import Emitter, ParseRoutine
from kvasir.parse.format import Style
from kvasir.parse.tape import Emit, Tape, marks, nothing

_FACTS = {key: "name" for key in ("name", "tool_name")}
_FACTS |= {key: "arguments" for key in ("arguments", "parameters", "args")}
_FACTS |= {key: "nothing" for key in ("id", "tool_call_id", "type")}
_FACTS |= {"function": "function"}


def objects(emitter: Emitter, bare: bool) -> ParseRoutine:
    """Parses from the mark, or from the first bracket if `bare`."""
    tape, calls = emitter.tape, emitter.calls
    if not bare:
        yield from tape.skip(marks(*calls.begins))
        if calls.begins[1:]:  # the first mark may open all calls; the mark of one call follows then
            yield from tape.skip(marks(*calls.begins[1:]))
        yield from tape.skip(marks(*calls.fence[:1]))
    is_list = bool((yield from tape.skip(marks("["))))
    separator = marks("," if is_list else calls.texts.separator.strip() or ",")
    some = False
    while (yield from tape.skip(marks("{"))):
        if not (yield from (_keyed(emitter) if calls.style is Style.KEYED else _object(emitter, strict=bare))):
            return
        some = True
        tape.hold()
        if not (yield from tape.skip(separator)) and is_list:
            break
    if some:
        if is_list and tape.at_end:  # only a separator is held
            tape.hold()
        yield from emitter.closed("]" if is_list else "", *calls.fence[1:], *calls.ends)


def _object(emitter: Emitter, strict: bool) -> Generator[None, None, bool]:
    """An object after its opening brace. strict: only a call's keys, with the name before the arguments, arguments
    present, and all in plain strings, which is what a regular expression (as in grammars) can check. False if the
    object breaks off or contains anything that is not part of a call."""
    tape = emitter.tape
    facts: dict[str, str] = {}  # JSON texts
    while (character := (yield from tape.blank())) != "}":
        if (key := (yield from _key(tape))) is None:
            return False
        character = yield from tape.blank()
        fact = _FACTS.get(key[1:-1] if strict else json.loads(key), "")
        name = _string(facts.get("name"))
        if fact == "function" and character == "{" and not strict and name is None:
            tape.pos += 1
            return (yield from _object(emitter, strict)) and (yield from _rest_of_object(tape))
        if fact == "arguments" and character == "{" and name is not None and emitter.is_name(name):
            return (yield from _called(emitter, name))
        if fact in ("", "function") or fact in facts:
            return False
        if strict and (character != '"' or fact not in ("name", "nothing")):
            return False
        if (value := (yield from _json(tape, json_text.value))) is None:
            return False
        if strict and fact == "name" and not _is_plain_name(emitter, value):
            return False
        if fact != "nothing":
            facts[fact] = value
        if not (yield from tape.comma_or("}")):
            return False
    tape.pos += 1
    name, arguments = _string(facts.get("name")), _object_text(facts.get("arguments"))
    if name is None or not emitter.is_name(name) or arguments is None or (strict and "arguments" not in facts):
        return False
    emitter.start(name)
    emitter.arguments(arguments)
    emitter.end()
    return True


def _keyed(emitter: Emitter) -> Generator[None, None, bool]:
    """{NAME: ARGUMENTS}, after the opening brace."""
    tape = emitter.tape
    if (key := (yield from _key(tape))) is None or (yield from tape.blank()) != "{":
        return False
    name = json.loads(key)
    return emitter.is_name(name) and (yield from _called(emitter, name))


def _called(emitter: Emitter, name: str) -> Generator[None, None, bool]:
    """The arguments, emitted as they arrive, and the rest of the enclosing object."""
    emitter.start(name)
    whole = yield from json_text.value(emitter.tape, emitter.arguments)
    emitter.end()
    if not whole:
        return False
    emitter.tape.hold()
    return (yield from _rest_of_object(emitter.tape))


def _rest_of_object(tape: Tape) -> Generator[None, None, bool]:
    """The members after the arguments, up to the closing brace; False if they contain more facts about the call."""
    while (yield from tape.blank()) == ",":
        tape.pos += 1
        key = yield from _key(tape)
        if key is None or _FACTS.get(json.loads(key)) != "nothing":
            return False
        yield from tape.blank()
        if not (yield from json_text.value(tape, nothing)):
            return False
    closes = (yield from tape.peek()) == "}"
    tape.pos += closes
    return closes


def _key(tape: Tape) -> Generator[None, None, str | None]:
    """A key as JSON text, with the colon after it consumed; None if something else follows."""
    if (yield from tape.blank()) != '"' or (key := (yield from _json(tape, json_text.string))) is None:
        return None
    if (yield from tape.blank()) != ":":
        return None
    tape.pos += 1
    return key


def _json(tape: Tape, kind: Callable[[Tape, Emit], Generator[None, None, bool]]) -> Generator[None, None, str | None]:
    """The text of a string or value, which is held; None if it breaks off."""
    pieces: list[str] = []
    return "".join(pieces) if (yield from kind(tape, pieces.append)) else None


def _is_plain_name(emitter: Emitter, value: str) -> bool:
    name = _string(value)
    return emitter.is_name(name) and "\\" not in str(name) and value == json.dumps(name, ensure_ascii=False)


def _string(text: str | None) -> str | None:
    """The decoded JSON string; None for anything else."""
    value = json.loads(text) if text is not None and text.startswith('"') else None
    return value if isinstance(value, str) else None


def _object_text(text: str | None) -> str | None:
    """Arguments as JSON text: an object (also in a string of JSON), or no arguments at all; None for anything else."""
    if text is None or text == "null":
        return "{}"
    try:
        value = json.loads(text)
        if isinstance(value, str):
            value = json.loads(text := value, parse_constant=_refuse)
            text.encode()
    except UnicodeEncodeError:  # a lone surrogate in the string
        text = json.dumps(value)
    except (ValueError, RecursionError):
        return None
    return text if isinstance(value, dict) else None


def _refuse(constant: str) -> object:
    raise ValueError(constant)  # NaN and the infinities are not JSON
