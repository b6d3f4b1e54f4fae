"""SIGHUP replaces the replicas of a server one after another, and no stream breaks."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from kvasir.engine.front import Front
from kvasir.fleet.engine import FleetEngine
from kvasir.serve.settings import ServeSettings
from tests.e2e.server import serving
from tests.fleet.test_serve import ASKED, SMALL, comparable, ready, streamed
from tests.serve.fakes import EchoEngine, byte_tokenizer, template
from tests.serve.running import live


def restarts(server) -> list[int]:
    return [view["restarts"] for view in httpx.get(f"{server.url}/fleet").json()["replicas"]]


def test_all_replicas_are_replaced_under_a_stream():
    fleet = FleetEngine(lambda i: EchoEngine(step_seconds=0.005), 2)
    front = Front(fleet, byte_tokenizer(), template())
    with live(ServeSettings(port=0, drain=0.0, replaces_replicas=True), front) as server:
        body = {"prompt": "abc", "max_tokens": 60, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            for _ in range(3):  # of which the last two are one
                server.loop.call_soon_threadsafe(server.server.hang_up)
            text = "".join(lines)
        assert text.endswith("[DONE]") and text.count('"text"') >= 59
        while restarts(server) != [1, 1] and restarts(server) != [2, 2]:
            time.sleep(0.01)
        server.loop.call_soon_threadsafe(server.server.hang_up)
        while max(restarts(server)) < 2:
            time.sleep(0.01)


def test_other_servers_only_read_their_files():
    with live(ServeSettings(port=0)) as server:
        server.loop.call_soon_threadsafe(server.server.hang_up)
        server.ask(asyncio.sleep(0))
        assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("--api-workers", "2")], ids=["alone", "API workers"])
def test_a_hangup_replaces_the_processes_of_all_replicas(workers, tmp_path):
    flags = ("--replicas", "2", "--access-log", str(tmp_path / "access"), *workers, *SMALL)
    with serving("kvasir-mini", *flags) as (base, process), ThreadPoolExecutor(20) as pool:
        plain = {path: comparable(streamed(base, path)) for path in ASKED}
        before = {view["pid"] for view in ready(base)}
        streams = [(path, pool.submit(streamed, base, path)) for path in ASKED for _ in range(3)]
        time.sleep(0.1)
        os.kill(process.pid, signal.SIGHUP)
        for path, stream in streams:
            assert comparable(stream.result()) == plain[path], path
        while before & {view["pid"] for view in ready(base)}:
            time.sleep(0.05)
        assert [view["restarts"] for view in ready(base)] == [1, 1]
        (tmp_path / "access").rename(tmp_path / "old")
        os.kill(process.pid, signal.SIGUSR1)
        while not (tmp_path / "access").exists():
            httpx.get(f"{base}/version")
            time.sleep(0.05)
        assert [view["restarts"] for view in ready(base)] == [1, 1], "SIGUSR1 replaces nothing"
