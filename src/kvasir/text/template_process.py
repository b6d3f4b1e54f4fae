"""Rendering of templates in worker processes that can be killed; the parent's side of template_worker.py."""

import json
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from kvasir.errors import KvasirError, QueueFull, TemplateError

_SCRIPT = Path(__file__).with_name("template_worker.py")
_LENGTH = struct.Struct("<I")
_START_SECONDS = 30.0  # a machine under load starts a process slowly; this is no template's fault
_GRACE_SECONDS = 1.0  # after which a worker ends itself, should the parent not have killed it


class TemplateLimit(TemplateError):
    """A template passed its limit of time, memory or output, or ended its process."""


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What one rendering may use: wall time, characters of source and of output, bytes of address space."""

    seconds: float = 2.0
    max_source: int = 1 << 20
    max_output: int = 2 << 20
    memory: int = 512 << 20


class TemplateRenderer:
    """Owns a few worker processes and lends one to each rendering; safe to use from several threads.

    Workers start when they are needed. One that exceeds a limit is killed, and the next rendering gets a
    fresh one, so a hanging template holds its place for `limits.seconds` and no longer.
    """

    def __init__(self, limits: TemplateLimits = TemplateLimits(), max_workers: int = 2):
        self.limits = limits
        self._places = threading.BoundedSemaphore(max_workers)
        self._max_workers = max_workers
        self._idle: list[_Worker] = []  # the last used at the end; append and pop are atomic
        self._finalizer = weakref.finalize(self, _kill_all, self._idle)

    def prewarm(self) -> None:
        """Start a worker now, so that the first rendering does not wait for it."""
        with self._lent():
            pass

    def render(self, source: str, variables: Mapping[str, Any], now: datetime | None = None) -> str:
        """The text that the template makes of JSON-like `variables`.

        Raises `TemplateError` with the template's own message where it refuses or fails, its subclass
        `TemplateLimit` where it passes a limit, and `QueueFull` where no worker becomes free in time.
        """
        if len(source) > self.limits.max_source:
            raise TemplateError(f"the chat template has {len(source)} characters, over {self.limits.max_source}")
        request = {
            "source": source,
            "variables": variables,
            "now": (now or datetime.now()).isoformat(),
            "max_output": self.limits.max_output,
            "seconds": self.limits.seconds + _GRACE_SECONDS,
        }
        try:
            frame = _frame(request)
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(f"the conversation is not plain JSON: {error}") from error
        with self._lent() as worker:
            reply = worker.exchange(frame, self.limits.seconds)
        if "error" in reply:
            raise (TemplateLimit if reply["kind"] == "limit" else TemplateError)(str(reply["error"]))
        return str(reply["text"])

    def close(self) -> None:
        """End the idle workers; a later rendering starts a new one."""
        _kill_all(self._idle)

    @contextmanager
    def _lent(self) -> "Iterator[_Worker]":
        if not self._places.acquire(timeout=2 * self._max_workers * self.limits.seconds + _START_SECONDS):
            raise QueueFull("all template workers are busy", "try again in a moment")
        worker = None
        try:
            worker = self._idle_worker() or _Worker(self.limits.memory)
            yield worker
        finally:
            if worker is not None and worker.usable:
                self._idle.append(worker)
            elif worker is not None:
                worker.kill()
            self._places.release()

    def _idle_worker(self) -> "_Worker | None":
        while self._idle:
            worker = self._idle.pop()
            if worker.process.poll() is None:
                return worker
            worker.kill()
        return None


class _Worker:
    """One worker process; used by one thread at a time."""

    def __init__(self, memory: int):
        self._socket, theirs = socket.socketpair()
        settings = json.dumps({"path": [p for p in sys.path if p], "memory": memory})
        with theirs:
            # Isolated (-I) and without site (-S): the import path is ours, given in the settings.
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", "utf8", str(_SCRIPT), settings],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={},  # nothing to find there: no key, no token
            )
        try:
            self.usable = self._receive(time.monotonic() + _START_SECONDS) == {"ready": True}
        except (OSError, EOFError) as error:
            self.kill()
            raise KvasirError(f"the process for chat templates does not start ({type(error).__name__})") from error

    def exchange(self, frame: bytes, seconds: float) -> dict[str, Any]:
        """The answer to a request; afterwards `usable` says whether the worker is still good."""
        self.usable = False
        deadline = time.monotonic() + seconds
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(frame)
            reply = self._receive(deadline)
        except TimeoutError as error:
            raise TemplateLimit(f"the chat template ran for more than {seconds:g} seconds") from error
        except (OSError, EOFError) as error:
            raise TemplateLimit("the chat template ended the process it ran in") from error
        self.usable = reply.get("kind") != "limit"
        return reply

    def kill(self) -> None:
        self.usable = False
        self.process.kill()
        self.process.wait()
        self._socket.close()

    def _receive(self, deadline: float) -> dict[str, Any]:
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        return json.loads(self._read(size, deadline))

    def _read(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            self._socket.settimeout(remaining)
            chunk = self._socket.recv(min(size - len(data), 1 << 16))
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)


def _frame(message: Mapping[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return _LENGTH.pack(len(data)) + data


def _kill_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().kill()
