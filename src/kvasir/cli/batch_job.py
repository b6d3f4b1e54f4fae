"""BatchJob: the lines of a file in the format of OpenAI's batches through a server's routes, without the server."""

from __future__ import annotations

import asyncio
import os
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvasir.data.checkpoint import Checkpoint, content_key
from kvasir.errors import ConfigError, EngineDead
from kvasir.serve.hosting.catalogue import Catalogue
from kvasir.serve.records.batches.call import Caller, CallResult, retry_pause
from kvasir.serve.records.batches.in_flight import InFlight, Places
from kvasir.serve.records.batches.lines import LineFault, LineTask, answered, left_out, parse_line
from kvasir.serve.records.batches.wire import Endpoint
from kvasir.serve.records.store import new_id

ENDPOINTS = (*typing.get_args(Endpoint), "/v1/score", "/v1/rerank", "/v1/classify", "/v1/pooling")
NOT_RUN = ("not_run", "this line was not run: the input file has changed meanwhile")


class KeptLine(msgspec.Struct):
    """A line that was answered. output: its line of the output."""

    status: int
    output: msgspec.Raw


class Line(msgspec.Struct):
    """A line of the input. fault: (code, message) of one that cannot be run."""

    task: LineTask
    url: str = ""
    key: bytes = b""
    fault: tuple[str, str] | None = None


class BatchJob:
    """Lines that are answered go into the checkpoint at once. Then the output is written, in the order of the input."""

    def __init__(
        self,
        catalogue: Catalogue,
        caller: Caller,
        checkpoint: Checkpoint,
        identity: str,
        width: int | None,
        on_line: Callable[[], None],
    ):
        """identity: of the model and its arithmetic; other models' lines are computed anew. width: lines at once; None:
        by what the engines compute. on_line: called for each line that is finished."""
        self._catalogue, self._caller, self._checkpoint, self._identity = catalogue, caller, checkpoint, identity
        self._in_flight = InFlight(width, catalogue.rows)
        self._on_line = on_line
        # Lines of an earlier run, and of the output: good ones, bad ones, and of these those worth another attempt.
        self.kept = self.completed = self.failed = self.broken = 0

    async def run(self, file: BinaryIO) -> None:
        """Raises OSError, EngineDead if there is no engine any more."""
        try:
            async with self._in_flight.batch() as places, asyncio.TaskGroup() as group:
                for line in self._lines(file):
                    if self._is_finished(line):
                        self._on_line()
                        await asyncio.sleep(0)  # many such lines in a row do not stop those that are under way
                        continue
                    await places.enter()
                    group.create_task(self._run_one(line, places))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _is_finished(self, line: Line) -> bool:
        """Whether it cannot be run or was answered by an earlier run, unless the server was at fault."""
        if line.fault:
            return True
        kept = self._answer(line)
        self.kept += (finished := kept is not None and kept.status < 500)
        return finished

    def _answer(self, line: Line) -> KeptLine | None:
        kept = self._checkpoint.get(line.key)
        try:
            return None if kept is None else msgspec.json.decode(kept, type=KeptLine)
        except msgspec.MsgspecError:
            return None

    async def _run_one(self, line: Line, places: Places) -> None:
        try:
            id = new_id("req")
            answer = await self._ask(line, id)
            entry = await asyncio.to_thread(answered, line.task, answer.status, answer.body, id)
            self._checkpoint.add(line.key, msgspec.json.encode(KeptLine(answer.status, entry.output)))
            self._on_line()
        finally:
            places.leave()

    async def _ask(self, line: Line, id: str) -> CallResult:
        while True:
            async with self._in_flight.all.one():
                answer = await self._caller.post(line.url, line.task.body, None, id)
            if (pause := retry_pause(answer)) is None:
                return answer
            if ended := [one for one in self._catalogue.loaded() if one.front.engine.ended]:
                raise EngineDead(ended[0].front.engine.state.reason or "the engine has ended", "run the command again")
            await asyncio.sleep(pause)

    def write(self, file: BinaryIO, output: Path) -> None:
        """Writes the output, which appears when it is complete. Raises OSError."""
        part = output.with_name(f"{output.name}.part")
        with open(part, "wb") as out:
            for line in self._lines(file):
                kept = None if line.fault else self._answer(line)
                if kept is None:
                    text = bytes(left_out(line.task, *(line.fault or NOT_RUN), new_id("req")).output)
                else:
                    text = bytes(kept.output)
                self.completed += (good := kept is not None and kept.status == 200)
                self.failed += not good
                self.broken += not line.fault and (kept is None or kept.status >= 500)
                out.write(text + b"\n")
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, output)

    def _lines(self, file: BinaryIO) -> Iterator[Line]:
        """The lines that are not blank. Bad ones have a fault and, if they have one, their custom_id."""
        seen: set[bytes] = set()
        file.seek(0)
        for index, text in enumerate(text for text in pieces(file, self._catalogue.settings.max_body) if text.strip()):
            line = self._line(index, text)
            id = content_key(line.task.custom_id)
            if not line.fault and id in seen:
                line.fault = ("duplicate_custom_id", "an earlier line uses the same custom_id")
            seen.add(id)
            yield line

    def _line(self, index: int, text: bytes) -> Line:
        try:
            found = parse_line(text, self._catalogue.settings)
        except LineFault as fault:
            code, message, param = fault.args
            message = f"{param}: {message}" if param else message
            return Line(LineTask(index, custom_id_of(text), b""), fault=(code, message))
        body = msgspec.json.encode(found.body)
        task = LineTask(index, found.custom_id, body)
        if found.url not in ENDPOINTS:
            return Line(task, fault=("invalid_url", f"url: expected one of {', '.join(ENDPOINTS)}"))
        return Line(task, found.url, content_key((self._identity, found.custom_id, found.url, found.body)))


def custom_id_of(text: bytes) -> str:
    """The custom_id of a bad line; "" if it cannot be read."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    id = found.get("custom_id") if isinstance(found, dict) else None
    return id[:256] if isinstance(id, str) else ""


def pieces(file: BinaryIO, most: int) -> Iterator[bytes]:
    """The lines of a file; of longer ones the first `most` + 1 bytes."""
    while text := file.readline(most + 1):
        yield text
        while not text.endswith(b"\n") and (text := file.readline(most + 1)):
            pass


def open_input(path: Path) -> BinaryIO:
    """Raises ConfigError."""
    try:
        return open(path, "rb")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", "expected a file with a request in each line") from None
