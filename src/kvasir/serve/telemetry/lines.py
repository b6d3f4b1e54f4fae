"""LineLog: a file of JSON lines, written by its own thread, so that a slow disk never blocks the event loop."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from kvasir.errors import ConfigError

log = logging.getLogger("kvasir.serve")

MOST = 10_000  # lines in the queue
AT_ONCE = 256  # maximum lines per write
END_SECONDS = 5.0  # for which `close` waits for the last lines


class LineLog:
    """path: opened for appending, created with mode 0600; "-" is the standard output. Raises ConfigError if it cannot
    be opened.

    `dropped` counts the lines lost because the disk was too slow or a write failed.
    """

    def __init__(self, path: Path, most: int = MOST):
        self._full = self._failed = 0  # lines; each is changed by one thread only
        self._path = path
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue(most)
        self._moved = threading.Event()
        try:
            self._file = self._open()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}", "expected a file to write to") from None
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._thread.start()

    def put(self, line: dict[str, Any]) -> None:
        """Queues a line; never blocks."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._full += 1

    @property
    def dropped(self) -> int:
        return self._full + self._failed

    def reopen(self) -> None:
        """The next line goes to the file that has the name by then (log rotation)."""
        self._moved.set()

    def close(self) -> None:
        """Writes the remaining lines, if that takes at most a few seconds. Blocks."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=END_SECONDS)
            self._thread.join(END_SECONDS)

    def _open(self) -> int:
        if self._path == Path("-"):
            return sys.stdout.fileno()
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Non-blocking, so that opening a pipe does not wait for its reader.
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        os.set_blocking(file, True)
        return file

    def _write_all(self) -> None:
        more = True
        while more:
            lines = [self._lines.get()]
            with contextlib.suppress(queue.Empty):
                while len(lines) < AT_ONCE:
                    lines.append(self._lines.get_nowait())
            more = None not in lines
            self._write([line for line in lines if line is not None])
        if self._path != Path("-"):
            os.close(self._file)

    def _write(self, lines: list[dict[str, Any]]) -> None:
        try:
            self._follow()
            data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            if not self._failed:
                log.error("%s: %s; lines are lost", self._path, error.strerror)
            self._failed += len(lines)

    def _follow(self) -> None:
        """Opens the file that has the name after a rotation. Keeps the old file if that fails."""
        if self._moved.is_set() and self._path != Path("-"):
            self._moved.clear()
            new = self._open()
            os.close(self._file)
            self._file = new
