"""Waits until the process of an engine has loaded the model."""

from __future__ import annotations

import signal
import subprocess
import time

import zmq.asyncio

from kvasir.engine import wire
from kvasir.engine.progress import Progress
from kvasir.engine.watchdog import Watchdog, use_of
from kvasir.errors import EngineDead


class Killed(EngineDead):
    """The process was killed with SIGKILL while it started."""


async def first_events(
    socket: zmq.asyncio.Socket, process: subprocess.Popen, progress: Progress | None, watchdog: Watchdog | None
) -> wire.Ready:
    """The message with which the process takes requests. Raises KvasirError if it cannot start. watchdog: raises for a
    hung process; None at the very first start, which users watch themselves."""
    last = time.monotonic()
    while True:
        if await socket.poll(100):
            if watchdog:
                watchdog.heard()
            event = wire.decode_event(await socket.recv())
            if isinstance(event, wire.Ready):
                return event
            if isinstance(event, wire.ErrorReport):
                raise wire.to_error(event)
            if isinstance(event, wire.Progress) and progress:
                progress(event.done, event.total, event.kernels)
        elif (status := process.poll()) is not None:
            kind = Killed if status == -signal.SIGKILL else EngineDead
            raise kind(
                f"the engine process exited with status {status} during start-up",
                "see its last log lines above",
            )
        elif watchdog:
            watchdog.tick(time.monotonic() - last, use_of(process.pid))
            if watchdog.verdict:
                raise EngineDead(f"the engine process does not start: {watchdog.verdict}")
        last = time.monotonic()
