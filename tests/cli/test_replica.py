"""`kvasir replica`, and `kvasir serve --replica`: options that are refused, and two replicas of which one is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from typer.testing import CliRunner

from kvasir.cli.app import app
from kvasir.errors import ConfigError
from tests.serve.test_server import ENVIRONMENT, ROOT

ADDRESS = "tcp://127.0.0.1:9"


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "key"
    path.write_text("a key of sufficient length\n")
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replica", ADDRESS], "need a key"),
        (["--replica", "http://a:1"], "no address"),
        (["--replica", ADDRESS, "--replica", ADDRESS, "--replica-key", "KEY"], "twice"),
        (["--replica", ADDRESS, "--replica-key", "KEY", "--replicas", "2"], "--replicas"),
        (["--replica", ADDRESS, "--replica-key", "absent"], "absent"),
        (["--replica-key", "KEY"], "--replica"),
        (["--replica", "tls://a:1", "--replica-key", "KEY", "--replica-ca", "KEY"], "PEM"),
        (["other", "--replica", ADDRESS, "--replica-key", "KEY"], "several"),
    ],
)
def test_servers_refuse_replicas_that_cannot_be(options, message, key):
    given = [key if option == "KEY" else option for option in options]
    result = CliRunner().invoke(app, ["serve", "kvasir-mini", *given])
    assert isinstance(result.exception, ConfigError) and message in str(result.exception), result.exception


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "no TLS"),
        (["--tls-cert", "a"], "its key"),
        (["--tls-ca", "a"], "its key"),
        (["--tls-cert", "absent", "--tls-key", "absent"], "absent"),
    ],
)
def test_replicas_refuse_what_is_not_safe(options, message, key):
    result = CliRunner().invoke(app, ["replica", "kvasir-mini", "--replica-key", key, *options])
    assert isinstance(result.exception, ConfigError) and message in str(result.exception), result.exception


def test_a_key_is_private_and_long(tmp_path):
    path = tmp_path / "key"
    for text, mode, message in (
        ("short", 0o600, "no key"),
        ("long enough for a key", 0o644, "chmod"),
        ("\xff" * 20, 0o600, "no key"),
    ):
        path.write_text(text)
        path.chmod(mode)
        result = CliRunner().invoke(app, ["replica", "kvasir-mini", "--replica-key", str(path)])
        assert isinstance(result.exception, ConfigError) and message in str(result.exception)


@contextmanager
def command(*arguments: str):
    """The process of a command and the address that it prints."""
    line = [sys.executable, "-m", "kvasir.cli", *arguments]
    with subprocess.Popen(line, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            for text in process.stdout:
                if found := re.search(r" at (\w+://[\d.:]+)", text):
                    yield process, found[1]
                    break
            else:
                raise AssertionError(f"{arguments} ended")
        finally:
            process.terminate()
            process.wait(60)


@pytest.mark.slow
def test_streams_survive_the_death_of_a_replica(key):
    small = ("kvasir-mini", "--threads", "1", "--num-blocks", "60")
    with ExitStack() as stack:
        there = [stack.enter_context(command("replica", *small, "--replica-key", key, "--port", "0")) for _ in range(2)]
        addresses = [option for _, address in there for option in ("--replica", address)]
        serve = ("serve", "kvasir-mini", "--port", "0", "--replica-key", key, "--api-workers", "2", *addresses)
        _, url = stack.enter_context(command(*serve))
        body = {"prompt": "Hello", "max_tokens": 200, "temperature": 0, "ignore_eos": True}

        def ask(_: int) -> str:
            response = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
            return response.json()["choices"][0]["text"]

        expected = ask(0)
        with ThreadPoolExecutor(8) as pool:
            got = [pool.submit(ask, i) for i in range(8)]
            while not all(r["open"] for r in httpx.get(f"{url}/fleet").json()["replicas"]):
                assert not any(one.done() for one in got)
            os.kill(there[0][0].pid, signal.SIGKILL)
            assert [one.result() for one in got] == [expected] * 8
        assert ask(0) == expected
