"""The process in which chat templates run, started as a script so that it imports Jinja2 and nothing of ours.

A template comes with a model or a request and may be hostile. Jinja2's sandbox keeps it from Python's inner
life; it bounds neither time nor memory, which takes a process of its own that can be killed.

Protocol, on standard input and output: frames of a u32 length (little-endian) and that many bytes of JSON.

    worker  {"ready": true}                                        once, when its imports are done
    parent  {"source", "variables", "now", "max_output", "seconds"}
    worker  {"text"} or {"error", "kind"}                          kind: "template" or "limit"

After an error of kind "limit" the worker ends itself. The environment is the one that `transformers`
documents for chat templates: trimmed blocks, `break` and `continue`, `raise_exception`, `strftime_now`, a
`tojson` that keeps key order and escapes no HTML, and `{% generation %}`, which does nothing here.
"""

import json
import resource
import signal
import struct
import sys
from datetime import datetime
from functools import lru_cache
from typing import BinaryIO

if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])["path"]

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CACHED_TEMPLATES = 32
MAX_MESSAGE_CHARS = 1000
_LENGTH = struct.Struct("<I")


class OutputTooLong(Exception):
    """The rendered text passed its limit."""


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what an assistant wrote, for training: its body is
    rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - Jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Namespace(jinja2.utils.Namespace):
    """`namespace(...)` without underscore names, through which CPython's internals could be reached."""

    def __init__(self, /, *args, **kwargs):
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not have an attribute named {name!r}")


def make_dict(*args, **kwargs) -> dict:
    """`dict(...)` as a function, so that a template does not hold the type itself."""
    return dict(*args, **kwargs)


def raise_exception(message: object) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "dict": make_dict, "namespace": Namespace}
    return environment


ENVIRONMENT = make_environment()


@lru_cache(maxsize=CACHED_TEMPLATES)
def compiled(source: str) -> jinja2.Template:
    return ENVIRONMENT.from_string(source)


def render(source: str, variables: dict, now: str, max_output: int) -> str:
    """The rendered text; `now` (ISO 8601) is what `strftime_now` reads as its clock."""
    clock = datetime.fromisoformat(now)
    size, pieces = 0, []
    for piece in compiled(source).generate({**variables, "strftime_now": clock.strftime}):
        size += len(piece)
        if size > max_output:
            raise OutputTooLong
        pieces.append(piece)
    return "".join(pieces)


def answer(request: dict) -> dict:
    """Render one request; every failure becomes an answer."""
    # Should the parent be gone when its time is up, nobody else ends a template that never ends.
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    try:
        text = render(request["source"], request["variables"], request["now"], request["max_output"])
        return {"text": text}
    except OutputTooLong:
        return _failure("limit", f"the chat template wrote more than {request['max_output']} characters")
    except (MemoryError, RecursionError, OverflowError) as error:
        return _failure("limit", f"the chat template asked for too much: {_describe(error)}")
    except jinja2.exceptions.TemplateSyntaxError as error:
        return _failure("template", f"the chat template is malformed: {error.message} (line {error.lineno})")
    except jinja2.exceptions.SecurityError as error:
        return _failure("template", f"the chat template did what the sandbox forbids: {error}")
    except jinja2.exceptions.TemplateError as error:
        return _failure("template", str(error) or type(error).__name__)
    except Exception as error:
        return _failure("template", f"the chat template failed: {_describe(error)}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _failure(kind: str, message: str) -> dict:
    return {"kind": kind, "error": message[:MAX_MESSAGE_CHARS]}


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def limit_resources(memory: int) -> None:
    """Bound the address space to `memory` bytes, and allow neither new files of any size nor core dumps."""
    for kind, limit in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        try:
            resource.setrlimit(kind, (limit, limit))
        except (ValueError, OSError):  # some systems know the limit but do not let it be set
            continue


def read_frame(stream: BinaryIO) -> dict | None:
    """The next message, None at the end of the stream."""
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
