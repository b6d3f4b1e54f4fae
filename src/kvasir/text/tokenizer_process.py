"""Encoding in processes that can be killed; the parent's side of tokenizer_worker.py.

One process loads the tokenizer and replies with its table. Copies of it (forks), which share its memory, do the work:
each runs one job at a time, with limits of time and memory. A copy that exceeds a limit is killed, its job fails, and
the next job gets a fresh copy, which takes milliseconds.
"""

from __future__ import annotations

import hashlib
import os
import select
import signal
import socket
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kvasir.errors import InvalidRequest, KvasirError, ModelFileError
from kvasir.text import tokenizer_wire as wire
from kvasir.text.encoder import Texts
from kvasir.text.gguf_vocab import PREFIX
from kvasir.text.sandbox import (
    Channel,
    Hold,
    Sandbox,
    SandboxCancelled,
    SandboxedProcess,
    SandboxLimit,
    frame_of,
)
from kvasir.text.table import Table

SCRIPT = Path(__file__).with_name("tokenizer_worker.py")
WHAT = "tokenizer"
LOAD_SECONDS = 60.0
SECONDS = 5.0  # of processor time for any text; the library encodes a few MB/s
SECONDS_PER_BYTE = 1e-5
MOST_SECONDS = 60.0
MEMORY = 3 << 30  # bytes of address space, most of it for texts of many megabytes
MAX_WORKERS = max(2, min(4, os.cpu_count() or 1))
MAX_TABLE = 256 << 20  # bytes
SLICE_TEXTS, SLICE_BYTES = 256, 1 << 20  # limits of one job, unless a single text is larger


class FirstProcess:
    """The process that loads the tokenizer, and creates and ends the others. Thread-safe."""

    def __init__(self, load: bytes):
        """load: the frame of the first job. Raises KvasirError if the tokenizer cannot be used."""
        self._lock = threading.Lock()
        # A process with threads could not be forked.
        self._worker = SandboxedProcess(SCRIPT, WHAT, MEMORY, env={"TOKENIZERS_PARALLELISM": "false"})
        try:
            reply = self._worker.exchange_bytes(load, LOAD_SECONDS, MAX_TABLE)
            self.digest = hashlib.sha256(reply).digest()
            self.table = _expect(wire.Loaded, reply).table.check()
        except BaseException as error:
            self.close()
            if isinstance(error, SandboxLimit):
                raise ModelFileError(
                    f"the tokenizer cannot be loaded: {error.message}", "its file is malformed"
                ) from error
            raise

    @property
    def alive(self) -> bool:
        return self._worker.usable and self._worker.process.poll() is None

    def copy(self) -> Channel:
        """A new process: a fork of the first. Raises KvasirError."""
        ours, theirs = socket.socketpair()
        with theirs:
            frame = frame_of(wire.encode(wire.Fork(SECONDS)))
            try:
                with self._lock:
                    socket.send_fds(self._worker.socket, [frame], [theirs.fileno()])
                    reply = self._worker.exchange_bytes(b"", SECONDS)  # the frame is sent already; this reads the reply
                pid = _expect(wire.Forked, reply).pid
            except (OSError, KvasirError) as error:
                ours.close()
                raise KvasirError(f"the tokenizer's process cannot be forked ({error})") from error
        return Channel(WHAT, ours, Copied(self, pid, ours))

    def end(self, pid: int) -> int:
        """Kills a copy. Returns minus the signal that ended it, -1 if it is not known."""
        with self._lock, suppress(KvasirError):  # if the first process is gone, copies end at once or at their limit
            if self._worker.usable:
                reply = self._worker.exchange_bytes(frame_of(wire.encode(wire.Kill(SECONDS, pid))), SECONDS)
                return -_expect(wire.Ended, reply).signal
        return -1

    def close(self) -> None:
        """End this process and all its copies."""
        if self._worker.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._worker.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        self._worker.kill()


class Copied:
    """A copy, with the interface that the sandbox needs (sandbox.Process)."""

    def __init__(self, first: FirstProcess, pid: int, connection: socket.socket):
        self._first, self.pid, self._code = first, pid, -1
        self._watch = select.poll()
        self._watch.register(connection, select.POLLIN)
        self._ended = False

    def poll(self) -> int | None:
        """Call only while idle: -1 once it has ended, since an idle copy sends nothing."""
        return -1 if self._ended or self._watch.poll(0) else None

    def kill(self) -> None:
        if not self._ended:
            self._ended = True
            self._code = self._first.end(self.pid)

    def wait(self) -> int:
        return self._code  # `kill` has waited


class TokenizerPool(Sandbox):
    """The processes of one tokenizer: an `Encoder` (see encoder.py). Thread-safe."""

    def __init__(self, load: wire.LoadFolder | wire.LoadGGUF):
        """Raises ModelFileError, UnsupportedModel."""
        super().__init__(SCRIPT, WHAT, SECONDS, MEMORY, MAX_WORKERS, kept=1)
        self._load = frame_of(wire.encode(load))
        self._starting = threading.Lock()
        self._first = FirstProcess(self._load)
        self._ender = weakref.finalize(self, FirstProcess.close, self._first)
        self.table: Table = self._first.table
        self._digest = self._first.digest

    def encode(self, job: Texts, hold: Hold | None = None) -> list[list[int]]:
        """The ids of each text. hold: can end the job early. Raises InvalidRequest for texts that exceed the limits."""
        found: list[list[int]] = []
        for start, end in _slices(job.texts):
            some = replace(job, texts=job.texts[start:end], foreign=job.foreign[start:end])
            size = sum(len(text.encode()) for text in some.texts)
            seconds = min(MOST_SECONDS, SECONDS + size * SECONDS_PER_BYTE)
            found += self._ids(wire.Encode(seconds, some), seconds, size, hold)
        return found

    def spell(self, hidden: Mapping[str, int], texts: Sequence[str]) -> list[list[int]]:
        return self._ids(wire.Spell(SECONDS, hidden, texts), SECONDS, sum(map(len, texts)))

    def close(self) -> None:
        """End all processes; a later job starts them again."""
        super().close()
        with self._starting:
            self._first.close()

    def _ids(self, job: wire.Job, seconds: float, size: int, hold: Hold | None = None) -> list[list[int]]:
        frame = frame_of(wire.encode(job))
        try:
            reply = self.run_bytes(frame, seconds, (1 << 20) + 64 * size, hold)
        except SandboxCancelled as error:
            raise InvalidRequest(f"the text was not tokenized: {error.message}") from error
        except SandboxLimit as error:
            raise InvalidRequest(f"a text of {size} bytes cannot be tokenized: {error.message}", _TOO_MUCH) from error
        return _expect(wire.Ids, reply).lists()

    def _new_worker(self) -> Channel:
        with self._starting:
            if not self._first.alive:
                self._restart()
            return self._first.copy()

    def _restart(self) -> None:
        self._ender()
        self._first = FirstProcess(self._load)
        self._ender = weakref.finalize(self, FirstProcess.close, self._first)
        if self._first.digest != self._digest:
            self._first.close()
            raise KvasirError("the tokenizer's files have changed since the model was loaded", "load the model again")


_TOO_MUCH = "shorten the text; if short texts fail as well, the model's tokenizer file is malformed"


def folder_pool(folder: Path) -> TokenizerPool:
    """The processes for a Hugging Face folder. Raises ModelFileError."""
    return TokenizerPool(wire.LoadFolder(LOAD_SECONDS, str(folder.absolute())))


def gguf_pool(metadata: Mapping[str, object]) -> TokenizerPool:
    """The processes for the tokenizer in a GGUF's metadata. Raises ModelFileError, UnsupportedModel."""
    needed = {key: value for key, value in metadata.items() if key.startswith(PREFIX) or key == "general.name"}
    return TokenizerPool(wire.LoadGGUF(LOAD_SECONDS, needed))


def _slices(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """(start, end) of the texts of each job."""
    start, size = 0, 0
    for i, text in enumerate(texts):
        if i > start and (i - start == SLICE_TEXTS or size + len(text) > SLICE_BYTES):
            yield start, i
            start, size = i, 0
        size += len(text)
    if start < len(texts):
        yield start, len(texts)


def _expect(kind: type[Any], reply: bytes | bytearray) -> Any:
    found = wire.decode_reply(reply)
    if isinstance(found, wire.Failure):
        raise found.error()
    if not isinstance(found, kind):
        raise ModelFileError(f"the tokenizer's process replied with {type(found).__name__}, not {kind.__name__}")
    return found
