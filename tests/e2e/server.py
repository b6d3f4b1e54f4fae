"""A real `kvasir serve` in a separate process, for tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

SRC = Path(__file__).resolve().parents[2] / "src"


@contextmanager
def serving(model: str, *flags: str, key: str | None = None, path: str = ""):
    """Yields the base address; asks for a graceful stop at the end and expects status 0. path: a folder for the start
    of PYTHONPATH."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "kvasir.cli", "serve", model, "--port", str(port), *flags]
    command += ["--api-key", key] if key else []
    env = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{SRC}", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    base = f"http://127.0.0.1:{port}"
    try:
        _wait(base, process)
        yield base, process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            output, _ = process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            raise AssertionError(f"the server did not stop:\n{output}") from None
    assert process.returncode in (0, -signal.SIGTERM), output


def _wait(base: str, process: subprocess.Popen) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise AssertionError(f"the server ended:\n{process.communicate()[0]}")
        try:
            if httpx.get(f"{base}/health", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise AssertionError("the server did not become healthy")


def engine_pid(process: subprocess.Popen) -> int:
    """The process id of the engine; of a fleet, that of one of its replicas."""
    if found := engine_pids(process):
        return found[0]
    raise AssertionError("no engine process")


def engine_pids(process: subprocess.Popen) -> list[int]:
    """The process ids of the engines: the children that run kvasir.engine.worker."""
    import psutil

    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if "kvasir.engine.worker" in child.cmdline():
                found.append(child.pid)
    return found
