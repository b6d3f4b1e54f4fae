"""Servers with API workers, in processes of their own; each proves that no process and no folder was left."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from kvasir.environment import socket_base
from tests.serve.test_server import ENVIRONMENT, ROOT


@dataclass
class Running:
    """log: what it wrote to its standard error, after it has ended. base: for files of the test."""

    url: str
    main: psutil.Process
    log: str = ""
    base: Path = Path()

    @property
    def workers(self) -> list[psutil.Process]:
        """The processes of the API workers."""
        return [p for p in self.main.children() if _is_worker(p)]

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        """On a connection of its own, so that any worker may get it."""
        return httpx.post(self.url + path, json=body, timeout=60, trust_env=False, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, trust_env=False, **more)

    def reached(self) -> bool:
        """Whether a worker listens."""
        try:
            return self.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def metric(self, name: str, **labels: str) -> float:
        """A sample of /metrics; 0.0 if it does not exist."""
        for line in self.get("/metrics").text.splitlines():
            found = line.startswith((f"kvasir_{name}{{", f"kvasir_{name} "))
            if found and all(f'{label}="{value}"' in line for label, value in labels.items()):
                return float(line.rpartition(" ")[2])
        return 0.0


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "echo_worker" in " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return False


@contextmanager
def running(count: int, settings: dict[str, Any] | None = None, **runner: Any) -> Iterator[Running]:
    """settings: of ServeSettings, and hang_seconds."""
    command = [sys.executable, "-m", "tests.serve.workers.echo_main", str(count)]
    command += [json.dumps(settings or {}), json.dumps(runner)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, **pipes) as process:
        assert process.stdout and process.stderr
        server = None
        try:
            reply = ""
            while "/v1" not in reply:
                line = process.stdout.readline()
                assert line, process.stderr.read()
                reply += line
            found = re.search(r"https?://[^/]+", reply)
            assert found
            server = Running(found[0], psutil.Process(process.pid))
            family = [*server.workers]
            assert len(family) == count
            yield server
            family = {*family, *(server.workers if server.main.is_running() else ())}
            process.terminate()
            process.wait(60)
            psutil.wait_procs([*family], 30)
            assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
            assert process.returncode in (0, -9), process.returncode
            if process.returncode == 0:
                assert not list(socket_base().glob(f"kvasir-engine-{process.pid}-*"))
        finally:
            process.kill()
            if server:
                server.log = process.stderr.read()
                print(server.log)


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def folder(path: Path) -> str:
    path.mkdir(mode=0o700, exist_ok=True)
    return str(path)
