"""Worker processes for potentially hostile jobs: a worker can be killed without losing anything else.

A worker is a script. It reads frames on standard input (a little-endian u32 length and that many bytes) and replies to
each with a frame on standard output; its first frame is {"ready": true}. Frames are JSON unless the caller asks
for bytes; after a reply of kind "limit" the worker ends itself. Limits of time count the worker's
processor time, and the worker keeps to them by itself (worker_limits.py); the parent has a far limit of wall time.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

from kvasir.errors import KvasirError, QueueFull
from kvasir.text.worker_limits import OUT_OF_TIME, far

_LENGTH = struct.Struct("<I")
_START_SECONDS = 30.0  # a machine under load starts processes slowly, which is not the job's fault
MAX_REPLY = 1 << 30  # bytes; a larger length can only come from a broken worker


class SandboxLimit(KvasirError):
    """A job exceeded its limit of time or memory, or ended its process."""


class SandboxCancelled(SandboxLimit):
    """A job was ended by its `Hold`."""


class Sandbox:
    """Owns a few worker processes and lends one to each job; thread-safe.

    Workers start on demand. A worker that exceeds a limit is killed and the next job gets a fresh worker, so a job that
    hangs occupies its place for a limited time.
    """

    def __init__(
        self,
        script: Path,
        what: str,
        seconds: float,
        memory: int,
        max_workers: int = 2,
        hello: Callable[[], Mapping[str, Any]] | None = None,
        kept: int = 2,
        patience: float = 60.0,
    ):
        """what: the job's name in messages, in the singular. seconds: of processor time, which jobs tell their worker,
        too. memory: bytes of address space. hello: makes the first job
        of each new worker, with the data that all later jobs need. kept: workers beyond this number end after
        `patience` idle seconds."""
        self._script, self._what, self._seconds, self._memory = script, what, seconds, memory
        self._hello = hello
        self._places = threading.BoundedSemaphore(max_workers)
        self._max_workers = max_workers
        self._kept, self._patience = kept, patience
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._closed = 0  # number of `close` calls
        self.idle: list[Channel] = []  # most recently used last; append and pop are atomic
        self._finalizer = weakref.finalize(self, _kill_all, self.idle)

    def prewarm(self) -> None:
        """Start a worker so that the first job does not wait for it."""
        with self._lent():
            pass

    def run(self, job: Mapping[str, Any], hold: Hold | None = None) -> dict[str, Any]:
        """The reply to a JSON-like job. hold: can end the job early. Raises SandboxLimit, QueueFull if no worker
        becomes free in time, and the exceptions of `json.dumps` for a job that is not JSON-like."""
        frame = make_frame(job)
        with self._lent() as worker, hold.on(worker) if hold else nullcontext():
            return worker.exchange(frame, self._seconds)

    def run_bytes(self, frame: bytes, seconds: float, max_reply: int, hold: Hold | None = None) -> bytearray:
        """The reply to a frame, of at most `max_reply` bytes. Raises SandboxLimit, QueueFull."""
        with self._lent() as worker, hold.on(worker) if hold else nullcontext():
            return worker.exchange_bytes(frame, seconds, max_reply)

    def close(self) -> None:
        """End the workers; busy workers end after their current jobs. A later job starts a new worker."""
        with self._lock:
            self._closed += 1
            _kill_all(self.idle)

    @contextmanager
    def _lent(self) -> Iterator[Channel]:
        if not self._places.acquire(timeout=2 * self._max_workers * self._seconds + _START_SECONDS):
            raise QueueFull(f"all workers for {self._what}s are busy", "try again in a moment")
        worker, closed = None, self._closed
        try:
            worker = self._idle_worker() or self._new_worker()
            yield worker
        finally:
            if worker is not None and not self._rests(worker, closed):
                worker.kill()
            self._places.release()

    def _rests(self, worker: Channel, closed: int) -> bool:
        """Keep a worker for the next job if it is still usable. closed: the value of `_closed` when its job began."""
        with self._lock:
            if not worker.usable or closed != self._closed:
                return False
            worker.idle_since = time.monotonic()
            self.idle.append(worker)
            self._watch()
            return True

    def _watch(self) -> None:
        """Schedule `end_surplus` while there are more idle workers than `kept`. The lock must be held."""
        if len(self.idle) > self._kept and self._timer is None:
            self._timer = threading.Timer(self._patience, _end_surplus, (weakref.ref(self),))
            self._timer.daemon = True
            self._timer.start()

    def end_surplus(self) -> None:
        """End the workers beyond `kept` that have been idle for at least `patience` seconds, the longest idle first."""
        with self._lock:
            self._timer = None
            for worker in self.idle[: max(0, len(self.idle) - self._kept)]:
                if time.monotonic() - worker.idle_since >= self._patience:
                    with suppress(ValueError):  # a job took it meanwhile
                        self.idle.remove(worker)
                        worker.kill()
            self._watch()

    def _idle_worker(self) -> Channel | None:
        while self.idle:
            worker = self.idle.pop()
            if worker.process.poll() is None:
                return worker
            worker.kill()
        return None

    def _new_worker(self) -> Channel:
        worker = SandboxedProcess(self._script, self._what, self._memory)
        if self._hello is not None:
            try:
                reply = worker.exchange(make_frame(self._hello()), _START_SECONDS)
            except BaseException:
                worker.kill()
                raise
            if "error" in reply:
                worker.kill()
                raise KvasirError(str(reply["error"]))
        return worker


class Hold:
    """Ends a job from another thread by killing its worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: Channel | None = None
        self.ended = False

    @contextmanager
    def on(self, worker: Channel) -> Iterator[None]:
        """Active while the worker has the job. Raises SandboxCancelled if the job was ended, before or meanwhile."""
        with self._lock:
            if self.ended:
                raise SandboxCancelled("the job was cancelled before it started")
            self._worker = worker
        try:
            yield
        except SandboxLimit as error:
            if self.ended:
                raise SandboxCancelled("the job was cancelled") from error
            raise
        finally:
            with self._lock:
                self._worker = None

    def end(self) -> None:
        with self._lock:
            self.ended = True
            if self._worker is not None:
                self._worker.process.kill()


class Process(Protocol):
    """The methods that a worker needs of its process; `subprocess.Popen` has them."""

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


class Channel:
    """The connection to one worker process; used by one thread at a time."""

    def __init__(self, what: str, connection: socket.socket, process: Process):
        """Takes ownership of both. what: the job's name in messages, in the singular."""
        self._what = what
        self.idle_since = 0.0  # monotonic seconds
        self.socket, self.process = connection, process
        self.usable = True

    def exchange(self, frame: bytes, seconds: float) -> dict[str, Any]:
        """The JSON reply to a job; afterwards, `usable`: whether the worker can take another job. seconds: of processor
        time, after which the worker ends itself. Raises SandboxLimit."""
        data = self.exchange_bytes(frame, seconds)
        self.usable = False
        try:
            reply = json.loads(data)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            raise SandboxLimit(f"the {self._what} gave a reply that is not a JSON object")
        self.usable = reply.get("kind") != "limit"
        return reply

    def exchange_bytes(self, frame: bytes, seconds: float, max_reply: int = MAX_REPLY) -> bytearray:
        """The reply to a job, of at most `max_reply` bytes. Raises SandboxLimit; then the worker is unusable."""
        self.usable = False
        most = far(seconds)
        deadline = time.monotonic() + most
        try:
            self.socket.settimeout(most)
            self.socket.sendall(frame)
            reply = self._receive(deadline, max_reply)
        except TimeoutError as error:
            raise SandboxLimit(f"the {self._what} did not end within {most:.3g} seconds") from error
        except (OSError, EOFError) as error:
            if self._exit_code() == -OUT_OF_TIME:
                raise SandboxLimit(f"the {self._what} ran for more than {seconds:.3g} seconds") from error
            raise SandboxLimit(f"the {self._what} crashed its process") from error
        self.usable = True
        return reply

    def kill(self) -> None:
        self.usable = False
        self._exit_code()
        self.socket.close()

    def _exit_code(self) -> int:
        """Ends the process. What ended it before counts."""
        self.process.kill()
        return self.process.wait()

    def _receive(self, deadline: float, max_reply: int = MAX_REPLY) -> bytearray:
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        if size > max_reply:
            raise SandboxLimit(f"the {self._what} gave a result of {size} bytes, over {max_reply}")
        return self._read(size, deadline)

    def _read(self, size: int, deadline: float) -> bytearray:
        data = bytearray()
        while len(data) < size:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            self.socket.settimeout(remaining)
            chunk = self.socket.recv(min(size - len(data), 1 << 20))
            if not chunk:
                raise EOFError
            data += chunk
        return data


class SandboxedProcess(Channel):
    """One worker process, started from a script."""

    def __init__(self, script: Path, what: str, memory: int, env: Mapping[str, str] | None = None):
        """memory: bytes of address space. env: the complete environment; empty by default, so that it contains no keys
        or tokens."""
        ours, theirs = socket.socketpair()
        settings = json.dumps({"path": [p for p in sys.path if p], "memory": memory})
        with theirs:
            # Isolated (-I) and without site (-S): the settings contain the import path.
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", "utf8", str(script), settings],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=dict(env or {}),
            )
        super().__init__(what, ours, process)
        try:
            self.usable = json.loads(self._receive(time.monotonic() + _START_SECONDS)) == {"ready": True}
        except (OSError, EOFError) as error:
            self.kill()
            raise KvasirError(f"the process for {what}s did not start ({type(error).__name__})") from error


def make_frame(message: Mapping[str, Any]) -> bytes:
    return frame_of(json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def frame_of(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _end_surplus(sandbox: weakref.ref[Sandbox]) -> None:
    if (found := sandbox()) is not None:
        found.end_surplus()


def _kill_all(workers: list[Channel]) -> None:
    while workers:
        workers.pop().kill()
