"""The processes in which the `tokenizers` library runs, started as a script (see sandbox.py for the frames and
tokenizer_wire.py for their contents).

The first process loads the tokenizer and encodes nothing: it makes copies of itself (fork), which share its memory, and
ends them on request. A copy reads its jobs from its own socket. All end when the first process's socket closes.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":
    # This file's folder would shadow nothing, but the package may be importable only through an import hook.
    sys.path[:] = [*json.loads(sys.argv[1])["path"], str(Path(__file__).parents[2])]

from kvasir.text import gguf_tokenizer, hf_tokenizer
from kvasir.text import tokenizer_wire as wire
from kvasir.text.backend import Backend
from kvasir.text.worker_limits import limit_resources, limited_time

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 20


class Line:
    """Frames on a socket, and the sockets that are passed with them."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self.passed: list[int] = []  # file descriptors

    def receive(self) -> bytes | None:
        """The next frame; None once the other side has closed."""
        head = self._read(_LENGTH.size)
        return None if head is None else self._read(_LENGTH.unpack(head)[0])

    def send(self, data: bytes) -> None:
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def _read(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            chunk, passed, _, _ = socket.recv_fds(self._socket, min(_CHUNK, size - len(data)), 1)
            self.passed += passed
            if not chunk:
                return None
            data += chunk
        return bytes(data)


class First:
    """The process that loads the tokenizer."""

    def __init__(self, line: Line):
        self._line = line
        self._backend: Backend | None = None
        self._children: set[int] = set()

    def answer(self, job: wire.AnyJob) -> wire.AnyReply:
        if isinstance(job, wire.Fork):
            return wire.Forked(self._fork(self._line.passed.pop()))
        if isinstance(job, wire.Kill):
            return wire.Ended(self._end(job.pid))
        self._backend = _load(job)
        return wire.Loaded(self._backend.table())

    def _fork(self, passed: int) -> int:
        assert self._backend is not None, "the first job loads it"
        gc.collect()
        gc.freeze()  # so that garbage collection in a copy does not write to shared pages
        pid = os.fork()
        if pid:
            os.close(passed)
            self._children.add(pid)
            return pid
        for number in (0, 1):  # the copy must not hold the first process's socket open
            os.dup2(passed, number)
        os.close(passed)
        with suppress(OSError):
            serve(Line(socket.socket(fileno=0)), Copy(self._backend).answer)
        os._exit(0)

    def _end(self, pid: int) -> int:
        """The signal that ended it: another one than SIGKILL if it had ended before."""
        if pid not in self._children:
            return signal.SIGKILL
        self._children.discard(pid)
        os.kill(pid, signal.SIGKILL)
        return os.waitpid(pid, 0)[1] & 0x7F

    def end_all(self) -> None:
        for pid in tuple(self._children):
            self._end(pid)


class Copy:
    """A process that encodes."""

    def __init__(self, backend: Backend):
        self._backend = backend

    def answer(self, job: wire.AnyJob) -> wire.AnyReply:
        if isinstance(job, wire.Encode):
            return wire.Ids.of(self._backend.encode(job.what))
        assert isinstance(job, wire.Spell), "the first process does the other jobs"
        return wire.Ids.of(self._backend.spell(job.hidden, job.texts))


def _load(job: wire.AnyJob) -> Backend:
    if isinstance(job, wire.LoadFolder):
        return Backend(*hf_tokenizer.load(Path(job.folder)))
    assert isinstance(job, wire.LoadGGUF), "copies do the other jobs"
    return Backend(*gguf_tokenizer.build(job.metadata))


def serve(line: Line, answer: Callable[[wire.AnyJob], wire.AnyReply]) -> None:
    """Runs jobs until the other side closes; every failure becomes a reply."""
    while (data := line.receive()) is not None:
        job = wire.decode_job(data)
        try:
            with limited_time(job.seconds):
                reply = wire.encode(answer(job))
        except BaseException as error:  # the library's panics are not of type Exception
            reply = wire.encode(wire.Failure.of(error))
        line.send(reply)


def main(memory: int) -> None:
    limit_resources(memory)
    line = Line(socket.socket(fileno=0))
    first = First(line)
    line.send(b'{"ready": true}')
    try:
        serve(line, first.answer)
    finally:
        first.end_all()


if __name__ == "__main__":
    main(json.loads(sys.argv[1])["memory"])
