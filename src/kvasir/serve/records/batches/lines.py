"""The lines of a batch: validated before any of them runs, and their results, recorded one by one."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from kvasir.serve.http.limits import json_excess
from kvasir.serve.records.batches.wire import BatchLine
from kvasir.serve.settings import ServeSettings

MAX_LINES = 50_000
MAX_BLANK = 50_000  # blank lines in addition to them
MAX_ERRORS = 100  # reported per file


@dataclass(frozen=True, slots=True)
class LineTask:
    """index: of its line among the lines that are not blank."""

    index: int
    custom_id: str
    body: bytes


def read_tasks(data: bytes, endpoint: str, settings: ServeSettings) -> tuple[list[LineTask], list[dict[str, Any]]]:
    """The tasks of a file, and its errors in the API's format."""
    tasks: list[LineTask] = []
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    for number, text in enumerate(io.BytesIO(data), 1):
        if number > MAX_BLANK + MAX_LINES or (len(tasks) >= MAX_LINES and text.strip()):
            errors.append(_error("too_many_tasks", f"there are more than {MAX_LINES} lines", number))
            break
        if not text.strip():
            continue
        try:
            line = _line(text, endpoint, settings)
            if line.custom_id in seen:
                raise LineFault("duplicate_custom_id", "an earlier line uses the same id", "custom_id")
            seen.add(line.custom_id)
            tasks.append(LineTask(len(tasks), line.custom_id, msgspec.json.encode(line.body)))
        except LineFault as wrong:
            code, message, param = wrong.args
            errors.append(_error(code, message, number, param))
            if len(errors) >= MAX_ERRORS:
                break
    if not tasks and not errors:
        errors.append(_error("empty_file", "the file has no lines", None))
    return tasks, errors


class LineFault(Exception):
    """(code, message, field)"""


def _error(code: str, message: str, line: int | None, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "line": line, "param": param}


def _line(text: bytes, endpoint: str, settings: ServeSettings) -> BatchLine:
    line = parse_line(text, settings)
    if line.url != endpoint:
        raise LineFault("mismatched_url", f"the batch is for {endpoint}", "url")
    return line


def parse_line(text: bytes, settings: ServeSettings) -> BatchLine:
    """Raises LineFault."""
    if len(text) > settings.max_body:
        raise LineFault("line_too_long", f"the line has more than {settings.max_body} bytes", None)
    if excess := json_excess(text, settings.max_json_depth):
        raise LineFault("invalid_json_line", excess, None)
    try:
        line = BatchLine.model_validate(msgspec.json.decode(text))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LineFault("invalid_json_line", f"this is not valid JSON: {error}", None) from None
    except ValidationError as error:
        first = error.errors()[0]
        raise LineFault("invalid_request", first["msg"], ".".join(map(str, first["loc"])) or None) from None
    for name in ("stream", "background"):
        if line.body.get(name):
            raise LineFault("invalid_request", "batches do not support it", f"body.{name}")
    return line


class BatchEntry(msgspec.Struct):
    """The result of a task. output: its line in the output file. usage: the numbers of input tokens, cached input
    tokens, output tokens and reasoning tokens."""

    index: int
    ok: bool
    output: msgspec.Raw
    usage: tuple[int, int, int, int] = (0, 0, 0, 0)


class BatchJournal:
    """The entries of a batch, one line of JSON each, appended as they complete. Used in threads, by one at a time."""

    def __init__(self, path: Path | None):
        """path: None for a journal in memory only."""
        self._path = path
        self._file: int | None = None
        self._kept: list[BatchEntry] = []

    def open(self) -> None:
        """Opens the journal and truncates it after the last complete entry. Raises OSError."""
        if self._path is not None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(self._path, flags, 0o600)
            with open(self._path, "rb") as lines:
                whole = sum(map(len, itertools.takewhile(_is_entry, lines)))
            os.ftruncate(self._file, whole)

    def add(self, entry: BatchEntry) -> None:
        """Appends an entry. Raises OSError."""
        if self._file is None:
            self._kept.append(entry)
            return
        data, before = memoryview(msgspec.json.encode(entry) + b"\n"), os.fstat(self._file).st_size
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            os.ftruncate(self._file, before)  # so that the next entry starts on a new line
            raise

    def entries(self) -> list[BatchEntry]:
        """All entries. Raises OSError."""
        if self._path is None or self._file is None:
            return list(self._kept)
        return [msgspec.json.decode(line, type=BatchEntry) for line in self._path.read_bytes().splitlines()]

    def close(self, remove: bool = False) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if remove and self._path is not None:
            self._path.unlink(missing_ok=True)


def _is_entry(line: bytes) -> bool:
    try:
        msgspec.json.decode(line, type=BatchEntry)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return line.endswith(b"\n")


def answered(task: LineTask, status: int, body: bytes, request_id: str) -> BatchEntry:
    """The entry of a task that got a response, successful or not."""
    answer = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body or b"null")}
    output = {"id": request_id, "custom_id": task.custom_id, "response": answer, "error": None}
    ok = status == 200
    return BatchEntry(task.index, ok, msgspec.Raw(msgspec.json.encode(output)), _usage(body) if ok else (0, 0, 0, 0))


def left_out(task: LineTask, code: str, message: str, request_id: str) -> BatchEntry:
    """The entry of a task that was not run."""
    error = {"code": code, "message": message}
    output = {"id": request_id, "custom_id": task.custom_id, "response": None, "error": error}
    return BatchEntry(task.index, False, msgspec.Raw(msgspec.json.encode(output)))


class _Details(msgspec.Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


def _usage(body: bytes) -> tuple[int, int, int, int]:
    usage = msgspec.json.decode(body, type=_Answer).usage or _Usage()
    given = usage.input_tokens_details or usage.prompt_tokens_details or _Details()
    made = usage.output_tokens_details or usage.completion_tokens_details or _Details()
    tokens = usage.input_tokens or usage.prompt_tokens, usage.output_tokens or usage.completion_tokens
    return tokens[0], given.cached_tokens, tokens[1], made.reasoning_tokens


def to_jsonl(entries: Iterable[BatchEntry]) -> bytes:
    """The output lines in the order of the input."""
    ordered = sorted(entries, key=lambda entry: entry.index)
    return b"".join(bytes(entry.output) + b"\n" for entry in ordered)
