"""Workers and main processes that die, keys whose limits hold over all workers, and the end of a server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.serve.workers.running import Running, folder, running, until

LONG = {"prompt": "abc", "max_tokens": 150, "temperature": 0, "stream": True}


class Stream(threading.Thread):
    """Reads a stream in the background."""

    def __init__(self, server: Running, body: dict, **more):
        super().__init__()
        self.server, self.body, self.more = server, body, more
        self.text, self.whole, self.status = "", False, 0
        self.begun = threading.Event()
        self.start()
        assert self.begun.wait(60)

    def run(self) -> None:
        try:
            with httpx.stream(
                "POST", f"{self.server.url}/v1/completions", json=self.body, timeout=60, **self.more
            ) as got:
                self.status = got.status_code
                for line in got.iter_lines():
                    self.begun.set()
                    if line == "data: [DONE]":
                        self.whole = True
                    elif line.startswith("data: "):
                        self.text += "".join(c["text"] for c in json.loads(line[6:]).get("choices", ()))
        except httpx.HTTPError:
            pass
        finally:
            self.begun.set()


def streams_of(server: Running, count: int, body: dict | None = None) -> list[Stream]:
    return [Stream(server, body or LONG) for _ in range(count)]


def key(name: str, **limits) -> dict:
    return {"key": f"the secret of {name}".replace(" ", "-"), "name": name, "limits": limits}


def keys_file(path: Path, *keys: dict) -> str:
    path.write_text(json.dumps(keys))
    path.chmod(0o600)
    return str(path)


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key(name)['key']}"}


@pytest.mark.slow
def test_a_killed_worker_breaks_its_own_connections_only():
    with running(3, step_seconds=0.02) as server:
        before = server.metric("http_requests_total", route="/v1/completions", code="200")
        first, *_ = streams_of(server, 1)
        first.join()
        assert first.whole and len(first.text) == 150
        streams = streams_of(server, 12)
        time.sleep(1.2)  # a report of each worker
        counted = server.metric("generated_tokens_total")
        os.kill(server.workers[0].pid, signal.SIGKILL)
        for stream in streams:
            stream.join()
        whole = [stream for stream in streams if stream.whole]
        assert {stream.text for stream in whole} == {first.text}
        assert all(first.text.startswith(stream.text) for stream in streams)
        until(lambda: len(server.workers) == 3)
        assert [s.whole for s in streams_of(server, 6) if not s.join()] == [True] * 6
        assert server.metric("generated_tokens_total") >= counted
        assert server.metric("http_requests_total", route="/v1/completions", code="200") > before
        until(lambda: not server.get("/kvasir/live").json()["answers"])
        assert server.get("/health").json() == {"status": "ok"}


@pytest.mark.slow
def test_a_hung_worker_is_killed():
    with running(2, {"hang_seconds": 3.0}) as server:
        hung = server.workers[0]
        hung.suspend()
        psutil.wait_procs([hung], 60)
        until(lambda: len(server.workers) == 2)
        assert [s.whole for s in streams_of(server, 6) if not s.join()] == [True] * 6


@pytest.mark.slow
def test_workers_end_with_a_killed_hub(tmp_path):
    with running(2, {"data_dir": folder(tmp_path / "data")}, step_seconds=0.02) as server:
        streams, workers = streams_of(server, 2), server.workers
        os.kill(server.main.pid, signal.SIGKILL)
        psutil.wait_procs(workers, 30)
        assert not [worker for worker in workers if worker.is_running()]
        for stream in streams:
            stream.join()
    with running(2, {"data_dir": folder(tmp_path / "data")}):
        pass


@pytest.mark.slow
def test_running_requests_are_finished_before_the_end():
    with running(2, {"drain": 60}, step_seconds=0.02) as server:
        streams = streams_of(server, 4)
        relayed = threading.Thread(
            target=lambda: answers.append(
                server.post("/v1/responses", {"input": "ab", "max_output_tokens": 100, "temperature": 0})
            )
        )
        answers: list[httpx.Response] = []
        relayed.start()
        until(lambda: server.metric("http_requests_open") >= 6)
        server.main.terminate()
        for stream in streams:
            stream.join()
        relayed.join()
        assert all(stream.whole for stream in streams) and answers[0].json()["status"] == "incomplete"
        server.main.wait(60)


@pytest.mark.slow
def test_what_runs_too_long_gets_an_error():
    with running(2, {"drain": 0.3}, step_seconds=0.05) as server:
        streams = streams_of(server, 2, LONG | {"max_tokens": 220})
        server.main.terminate()
        for stream in streams:
            stream.join()
        assert not any(stream.whole for stream in streams)
        server.main.wait(60)


@pytest.mark.slow
def test_limits_of_a_key_hold_over_all_workers(tmp_path):
    keys = (
        key("few", requests_per_minute=5),
        key("two", concurrent=2),
        key("tokens", tokens_per_minute=60),
        key("free"),
    )
    settings = {"keys_file": keys_file(tmp_path / "keys", *keys)}
    short = {"prompt": "ab", "max_tokens": 3, "temperature": 0}
    with running(3, settings, step_seconds=0.02) as server:
        got = [server.post("/v1/completions", short, headers=bearer("few")) for _ in range(10)]
        assert sorted(r.status_code for r in got) == [200] * 5 + [429] * 5
        assert [r.headers["x-ratelimit-remaining-requests"] for r in got[:5]] == ["4", "3", "2", "1", "0"]
        assert all(float(r.headers["retry-after"]) > 0 for r in got if r.status_code == 429)
        relayed = server.post("/v1/responses", {"input": "ab"}, headers=bearer("few"))
        assert relayed.status_code == 429
        assert {server.post("/v1/completions", short, headers=bearer("free")).status_code for _ in range(8)} == {200}
        assert server.post("/v1/completions", short, headers=bearer("nobody")).status_code == 401
        # tokens: 3 requests of 2 + 18 tokens
        body = short | {"max_tokens": 18}
        got = [server.post("/v1/completions", body, headers=bearer("tokens")) for _ in range(5)]
        assert [r.status_code for r in got] == [200, 200, 200, 429, 429]
        # at once: places come back when a worker dies
        held = [Stream(server, LONG | {"max_tokens": 220}, headers=bearer("two")) for _ in range(2)]
        assert server.post("/v1/completions", short, headers=bearer("two")).status_code == 429
        for worker in server.workers:
            os.kill(worker.pid, signal.SIGKILL)
        for stream in held:
            stream.join()
        assert not any(stream.whole for stream in held)
        until(server.reached)
        assert server.post("/v1/completions", short, headers=bearer("two")).status_code == 200


@pytest.mark.slow
def test_new_keys_are_read_by_all(tmp_path):
    path = tmp_path / "keys"
    with running(2, {"keys_file": keys_file(path, key("ann", requests_per_minute=100))}) as server:
        keys_file(path, key("ann", requests_per_minute=100), key("bob", requests_per_minute=3))
        server.main.send_signal(signal.SIGHUP)
        short = {"prompt": "ab", "max_tokens": 1}

        def known() -> bool:
            return all(server.get("/v1/models", headers=bearer("bob")).status_code == 200 for _ in range(8))

        until(known)
        got = [server.post("/v1/completions", short, headers=bearer("bob")).status_code for _ in range(5)]
        assert got == [200] * 3 + [429] * 2


@pytest.mark.slow
def test_a_flood_of_clients_that_leave_costs_no_places(tmp_path):
    settings = {"keys_file": keys_file(tmp_path / "keys", key("two", concurrent=2))}
    with running(2, settings, step_seconds=0.01) as server:
        for _ in range(10):
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{server.url}/v1/completions", json=LONG, headers=bearer("two"), timeout=0.05)

        def free() -> bool:
            return server.post("/v1/completions", LONG | {"max_tokens": 1}, headers=bearer("two")).status_code == 200

        until(free)
        held = [Stream(server, LONG, headers=bearer("two")) for _ in range(2)]
        for stream in held:
            stream.join()
        assert [stream.status for stream in held] == [200, 200]
