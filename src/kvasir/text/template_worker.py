"""The process in which chat templates run, started as a script that imports Jinja2 and few modules of this package.

A template comes with a model or a request and may be hostile. Jinja2's sandbox blocks access to Python's internals, but
bounds neither time nor memory; that takes a separate process that can be killed.

Protocol, on standard input and output: frames of a u32 length (little-endian) and that many bytes of JSON.

    worker  {"ready": true}                                        once, when its imports are done
    parent  {"source", "variables", "own", "now", "max_output", "seconds"}
    worker  {"text", "spans"} or {"error", "kind"}                 kind: "template", "output" or "limit"

After an error of kind "limit" the worker ends itself. The strings in "variables" come from outside; "spans" are the
parts of the text that came from outside: start, end, mark (`marked_string`). "own" holds the template's own variables:
its special tokens.
"""

import json
import re
import struct
import sys
from datetime import datetime
from functools import lru_cache
from os.path import abspath, dirname
from typing import Any, BinaryIO

if __name__ == "__main__":
    sys.path[:] = [*json.loads(sys.argv[1])["path"], dirname(dirname(dirname(abspath(__file__))))]

import jinja2

from kvasir.text.marked_string import MODEL, from_outside, join, marks_of
from kvasir.text.template_environment import Environment
from kvasir.text.worker_limits import limit_resources, limited_time

CACHED_TEMPLATES = 32
MAX_MESSAGE_CHARS = 1000
ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
_RUNS = re.compile(rb"\x01+|\x02+")
_LENGTH = struct.Struct("<I")


class OutputTooLong(Exception):
    """The rendered text exceeded its limit."""


ENVIRONMENT = Environment()


@lru_cache(maxsize=CACHED_TEMPLATES)
def compiled(source: str) -> jinja2.Template:
    return ENVIRONMENT.from_string(source)


def render(source: str, variables: dict, now: str, max_output: int) -> str:
    """The rendered text, with marks; `strftime_now` uses `now` (ISO 8601) as its clock."""
    clock = datetime.fromisoformat(now)
    size, pieces = 0, []
    for piece in compiled(source).generate({**variables, "strftime_now": clock.strftime}):
        size += len(piece)
        if size > max_output:
            raise OutputTooLong
        pieces.append(piece)
    return join(pieces)


def marked_variables(source: str, variables: dict, own: dict) -> dict[str, Any]:
    """The variables, with the strings in `variables` marked as outside and those in `own` unmarked."""
    messages = variables.get("messages")
    theirs = {name: from_outside(value) for name, value in variables.items()}
    if isinstance(messages, list):
        theirs["messages"] = [_message(source, message) for message in messages]
    return own | theirs


def _message(source: str, message: Any) -> Any:
    """The content of an assistant message is marked as the model's own. A role that the template knows counts as the
    template's, since some templates form a token from it: `'<|' + message.role + '|>'`."""
    role = message.get("role") if isinstance(message, dict) else None
    if role == "assistant" and "content" in message:
        made = from_outside({**message, "content": None}) | {"content": from_outside(message["content"], MODEL)}
    else:
        made = from_outside(message)
    if isinstance(role, str) and (role in ROLES or f"'{role}'" in source or f'"{role}"' in source):
        made["role"] = role
    return made


def spans_of(text: str) -> list[tuple[int, int, int]]:
    """The runs of characters from outside: start, end, mark."""
    return [(*run.span(), run[0][0]) for run in _RUNS.finditer(marks_of(text))]


def answer(request: dict) -> dict:
    """Render one request; every failure becomes an error reply."""
    try:
        with limited_time(request["seconds"]):
            variables = marked_variables(request["source"], request["variables"], request.get("own") or {})
            text = render(request["source"], variables, request["now"], request["max_output"])
            return {"text": text, "spans": spans_of(text)}
    except OutputTooLong:
        return _failure("output", f"the chat template wrote more than {request['max_output']} characters")
    except (MemoryError, RecursionError, OverflowError) as error:
        return _failure("limit", f"the chat template exceeded its limits: {_describe(error)}")
    except jinja2.exceptions.TemplateSyntaxError as error:
        return _failure("template", f"the chat template is malformed: {error.message} (line {error.lineno})")
    except jinja2.exceptions.SecurityError as error:
        return _failure("template", f"the chat template used what the sandbox forbids: {error}")
    except jinja2.exceptions.TemplateError as error:
        return _failure("template", str(error) or type(error).__name__)
    except Exception as error:
        return _failure("template", f"the chat template failed: {_describe(error)}")


def _failure(kind: str, message: str) -> dict:
    return {"kind": kind, "error": message[:MAX_MESSAGE_CHARS]}


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def read_frame(stream: BinaryIO) -> dict | None:
    """The next message; None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    return json.loads(stream.read(_LENGTH.unpack(head)[0])) if len(head) == _LENGTH.size else None


def write_frame(stream: BinaryIO, message: dict) -> None:
    data = json.dumps(message).encode()
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def main(memory: int) -> None:
    limit_resources(memory)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    write_frame(answers, {"ready": True})
    while (request := read_frame(requests)) is not None:
        reply = answer(request)
        write_frame(answers, reply)
        if reply.get("kind") == "limit":
            return


if __name__ == "__main__":
    main(json.loads(sys.argv[1])["memory"])
