"""ApiProcess: one API worker as a child process, which is started again whenever it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable

from kvasir.environment import engine_environment
from kvasir.errors import ConfigError

log = logging.getLogger("kvasir.serve")

FREE_ATTEMPTS = 3  # restarts without a pause
LONGEST_PAUSE = 10.0  # seconds
STABLE_SECONDS = 30.0  # of running, after which the count of attempts is reset
WATCH_SECONDS = 0.2


class ApiProcess:
    """serving: the worker accepts connections. ending: it is not started again."""

    def __init__(
        self, module: str, spec: Callable[[int], bytes], listener: Callable[[], socket.socket], hang_seconds: float
    ):
        """module: run with a line on its standard input, whose end tells it that this process has ended. listener:
        makes the socket that it inherits. spec(descriptor of the socket): makes the line. hang_seconds: of silence,
        after which the worker is killed."""
        self._command = (sys.executable, "-m", module)
        self._spec = spec
        self._listener = listener
        self._hang = hang_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._heard = 0.0
        self.serving = asyncio.Event()
        self.ending = False
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def heard(self) -> None:
        """The worker gave a sign of life."""
        self._heard = time.monotonic()

    async def run(self) -> None:
        """Keeps the worker running until it is told to end. Raises ConfigError if its first start fails."""
        attempts = 0
        while not self.ending:
            begun = time.monotonic()
            try:
                status = await self._once()
            except OSError as error:  # for example, if no file descriptor is left
                log.error("an API worker could not be started: %s", error)
                status = -1
            if self.ending:
                return
            if not self.serving.is_set() and not self.restarts:
                raise ConfigError(f"an API worker exited with status {status} during its start", "see its log lines")
            self.serving.clear()
            self.restarts += 1
            attempts = 1 if time.monotonic() - begun > STABLE_SECONDS else attempts + 1
            pause = 0.0 if attempts <= FREE_ATTEMPTS else min(LONGEST_PAUSE, 2.0 ** (attempts - FREE_ATTEMPTS - 1))
            log.error("an API worker exited with status %d; starting it again in %g seconds", status, pause)
            await asyncio.sleep(pause)

    async def _once(self) -> int:
        with self._listener() as listener:  # the worker alone keeps it, so it closes when the worker ends
            line, more = self._spec(listener.fileno()), {"pass_fds": [listener.fileno()], "env": engine_environment()}
            process = await asyncio.create_subprocess_exec(*self._command, stdin=asyncio.subprocess.PIPE, **more)
        self._process = process
        watching = asyncio.ensure_future(self._watch(process))
        try:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.write(line + b"\n")
                await process.stdin.drain()
            return await process.wait()
        finally:
            watching.cancel()
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kills the worker if it serves and gives no sign of life."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            if now - last > 5 * WATCH_SECONDS:  # this process itself did not run
                self.heard()
            last = now
            if self.serving.is_set() and now - self._heard > self._hang:
                log.error("an API worker is hung; killing it")
                return process.kill()

    def signal(self, kind: signal.Signals) -> None:
        """Sends the worker a signal."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(kind)

    def end(self) -> None:
        """Asks the worker to drain and exit; a second time, to exit at once."""
        self.ending = True
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        self.ending = True
        self.signal(signal.SIGKILL)
