"""A server in a separate process: startup, shutdown, and modules that it never loads."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from kvasir.errors import ConfigError
from kvasir.serve.hosting.catalogue import OneModel
from kvasir.serve.server import bind, opening, serve
from kvasir.serve.settings import ServeSettings
from tests.serve.running import make_front

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "PYTHONUNBUFFERED": "1"}


@contextmanager
def process(settings: dict, runner: dict) -> Iterator[tuple[subprocess.Popen, str]]:
    """The process and its address."""
    command = [sys.executable, "-m", "tests.serve.echo_server", json.dumps(settings), json.dumps(runner)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, **pipes) as server:
        try:
            reply = ""
            while "/v1" not in reply:
                line = server.stdout.readline()
                assert line, server.stderr.read()
                reply += line
            found = re.search(r"http://[^/]+", reply)
            assert found and "fake" in reply and ("no key needed" in reply) == ("keys_file" not in settings)
            url = found[0]
            for _ in range(200):
                try:
                    httpx.get(f"{url}/health")
                    break
                except httpx.ConnectError:
                    time.sleep(0.02)
            yield server, url
        finally:
            server.kill()


class Reader(threading.Thread):
    """Reads a stream in the background."""

    def __init__(self, url: str, max_tokens: int):
        super().__init__()
        self.url, self.max_tokens, self.text = url, max_tokens, ""
        self.begun = threading.Event()
        self.start()
        assert self.begun.wait(20)

    def run(self) -> None:
        body = {"prompt": "ab", "max_tokens": self.max_tokens, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60) as response:
            for line in response.iter_lines():
                self.text += line + "\n"
                self.begun.set()


@pytest.mark.slow
@pytest.mark.parametrize("end", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT])
def test_running_answers_are_finished_before_the_end(end):
    with process({"drain": 30}, {"step_seconds": 0.01}) as (server, url):
        reader = Reader(url, 200)
        with httpx.Client(base_url=url) as kept:
            assert kept.get("/version").status_code == 200
            server.send_signal(end)
            while (health := httpx.get(f"{url}/health")).status_code == 200:
                time.sleep(0.01)
            assert health.status_code == 503 and health.json() == {"status": "draining"}
            for http in (httpx, kept):
                path = f"{url}/v1/completions"
                refused = http.post(path, json={"prompt": "ab"})
                assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
                assert refused.headers["retry-after"] == "1" and refused.headers["connection"] == "close"
            assert "kvasir_requests_open" in httpx.get(f"{url}/metrics").text
            assert server.poll() is None and "[DONE]" not in reader.text
        reader.join(30)
        assert "[DONE]" in reader.text and '"length"' in reader.text
        assert server.wait(20) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_second_signal_waits_for_nothing(end):
    with process({"drain": 600}, {"step_seconds": 0.05, "max_model_len": 100_000, "num_blocks": 10_000}) as (
        server,
        url,
    ):
        reader = Reader(url, 50_000)
        server.send_signal(end)
        while httpx.get(f"{url}/health").status_code == 200:
            time.sleep(0.01)
        server.send_signal(end)
        assert server.wait(30) == 0
        reader.join(30)
        assert "[DONE]" not in reader.text


@pytest.mark.slow
def test_shutdown_waits_for_background_work(tmp_path):
    with process({"drain": 60, "data_dir": str(tmp_path)}, {"step_seconds": 0.01}) as (server, url):
        body = {"model": "fake", "input": "ab", "max_output_tokens": 60, "temperature": 0, "background": True}
        made = httpx.post(f"{url}/v1/responses", json=body).json()
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    with process({"data_dir": str(tmp_path)}, {}) as (server, url):
        found = httpx.get(f"{url}/v1/responses/{made['id']}").json()
        assert found["status"] == "incomplete" and found["usage"]["output_tokens"] == 60
        server.send_signal(signal.SIGTERM)
        server.wait(20)


@pytest.mark.slow
def test_an_idle_server_ends_at_once():
    with process({"drain": 600}, {}) as (server, url), httpx.Client(base_url=url) as idle:
        idle.get("/version")
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0


def test_choices_cut_by_shutdown_end_with_an_error():
    with process({"drain": 0.5}, {"step_seconds": 0.05}) as (server, url):
        reader = Reader(url, 500)
        server.send_signal(signal.SIGTERM)
        reader.join(30)
        last = reader.text.strip().split("\n\n")[-1].removeprefix("data: ")
        assert json.loads(last)["error"]["code"] == "engine_unavailable"
        assert "[DONE]" not in reader.text and '"finish_reason":"' not in reader.text
        assert server.wait(20) == 0


@pytest.mark.slow
def test_the_api_process_never_loads_torch():
    code = (
        "import sys; from tests.serve.running import make_front; from kvasir.serve.app import create_app\n"
        "from kvasir.serve.hosting.catalogue import OneModel\n"
        "from kvasir.serve.server import run; from kvasir.serve.settings import ServeSettings\n"
        "create_app(OneModel(make_front(), ServeSettings())).openapi()\n"
        "heavy = sorted({'torch', 'transformers', 'ray', 'triton'} & set(sys.modules)); print('heavy', heavy)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.stdout.strip() == "heavy []", done.stderr


def test_an_address_in_use_is_reported_before_loading():
    with bind(ServeSettings(port=0)) as first:
        first.listen()
        with pytest.raises(ConfigError, match="--port"):
            bind(ServeSettings(port=first.getsockname()[1]))


async def test_unusable_files_are_reported_before_loading(tmp_path):
    absent = tmp_path / "absent"
    for files in ({"tls_cert": absent, "tls_key": absent}, {"access_log": tmp_path}, {"audit_log": tmp_path}):
        front = make_front()
        front.start = None  # type: ignore[method-assign]
        with pytest.raises(ConfigError, match="expected"):
            await serve(OneModel(front, ServeSettings(port=0, **files)))


def test_an_address_of_another_machine_is_an_error_with_the_flag():
    with pytest.raises(ConfigError, match=r"198\.51\.100\.1.*--host"):
        bind(ServeSettings(host="198.51.100.1", port=0, api_keys=("a-key-of-mine",)))
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid.*--host"):
        bind(ServeSettings(host="no.such.host.invalid", port=0, api_keys=("a-key-of-mine",)))


def test_names_and_ipv6_can_be_bound():
    with bind(ServeSettings(host="localhost", port=0)) as listener:
        assert listener.getsockname()[1] > 0
    if socket.has_ipv6:
        try:
            with bind(ServeSettings(host="::1", port=0)) as listener:
                assert listener.family == socket.AF_INET6
        except ConfigError:
            pytest.skip("this machine has no IPv6")


async def test_what_is_announced_states_the_models_and_the_address():
    front = make_front()
    await front.start()
    front.engine.summary = ("computes  bfloat16 on cpu", "KV memory 4096 tokens")
    said = await opening(OneModel(front, ServeSettings(api_keys=("first-key", "second-key"), host="::")), 8000)
    assert re.fullmatch(r"Kvasir \S+ serves fake at http://\[::\]:8000/v1 \(2 API keys\)", said.line)
    assert said.decisions == front.engine.summary
    names = ("one", "two", "three", "four", "five", "six")
    said = await opening(OneModel(front, ServeSettings(model_names=names)), 8000)
    assert "serves one, two, three, four and 2 more models at" in said.line
    await front.stop()
