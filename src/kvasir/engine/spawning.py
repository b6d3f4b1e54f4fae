"""Starts and ends the process of an engine (worker.py)."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvasir.engine import wire
from kvasir.environment import engine_environment
from kvasir.errors import EngineDead

FREE_ATTEMPTS = 3  # restarts without a pause
LONGEST_PAUSE = 30.0  # seconds
END_SECONDS = 6.0  # until a process that was asked to stop is killed; closing a core may take several of them


def spawn(spec: wire.WorkerSpec, address: Path) -> subprocess.Popen:
    """A process that runs what the spec describes and connects to the socket at the address. It may have been killed
    already. Raises EngineDead if the system cannot start a process."""
    command = [sys.executable, "-m", "kvasir.engine.worker", f"ipc://{address}"]
    pipe = subprocess.PIPE
    try:
        with _interrupts_wait():
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=engine_environment())
    except OSError as error:
        hint = "free memory, or raise the limit of processes (ulimit -u)"
        raise EngineDead(f"the engine's process cannot be started: {error.strerror}", hint) from error
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, which `first_events` reports
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        process.stdin.flush()
    return process


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Blocks SIGINT in this thread; a process that it starts never gets it. Ctrl-C goes to all processes of a terminal,
    and would end an engine that has not begun to ignore it, with a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def pause_after(attempts: int) -> float:
    """Seconds to wait before the next restart, after so many in a row."""
    late = attempts - FREE_ATTEMPTS
    return 0.0 if late < 0 else min(LONGEST_PAUSE, 2.0 ** min(late, 10))


async def exited(process: subprocess.Popen) -> int:
    """The status of a process, once it has ended."""
    while (status := process.poll()) is None:
        await asyncio.sleep(0.02)
    return status


def end(process: subprocess.Popen | None) -> None:
    """Waits for a process that was asked to stop, or was killed."""
    if process is None:
        return
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def close_pipes(process: subprocess.Popen | None) -> None:
    """Closes the pipes of a process that has ended, whose output the event loop may read."""
    if process is None or process.stdout is None or process.stdout.closed:
        return
    asyncio.get_running_loop().remove_reader(process.stdout)
    for pipe in (process.stdout, process.stdin):
        with contextlib.suppress(OSError):
            if pipe:
                pipe.close()
