"""Two real servers behind a proxy that speaks vLLM's handshake: the answers are those of one server."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import SRC, engine_pid, serving
from tests.e2e.toy_proxy import toy_proxy
from tests.kv.test_transfer import certificate

pytestmark = pytest.mark.slow

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 8


@dataclass
class Pair:
    """Two servers, and one that computes everything itself. push: where blocks are sent; "": they are fetched."""

    prefill: str
    decode: str
    alone: str
    push: str
    processes: tuple

    @property
    def ask(self) -> dict:
        return {"remote_host": self.push, "remote_port": 0} if self.push else {}


@pytest.fixture(scope="module", params=["fetch", "push", "fetch over TLS"])
def pair(tmp_path_factory, request) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("sockets")
    os.chmod(folder, 0o700)
    where = str(folder / "blocks")
    flags = ("--threads", "1", "--block-size", "16")
    listen, connect = ["--transfer-listen", where], ["--transfer-peer", where]
    if request.param.endswith("TLS"):
        if not shutil.which("openssl"):
            pytest.skip("no openssl to make certificates with")
        key = folder / "key"
        key.write_bytes(os.urandom(16).hex().encode())
        key.chmod(0o600)
        secrets = ["--transfer-key", str(key), "--transfer-cert", str(certificate(folder))]
        listen, connect = ["--transfer-listen", "127.0.0.1:0", *secrets], ["--transfer-peer", "127.0.0.1", *secrets]
    push = request.param == "push"
    first, second = (connect, listen) if push else (listen, connect)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with (
            serving("kvasir-mini", *flags, "--role", "prefill", *first) as (prefill, one),
            serving("kvasir-mini", *flags, "--role", "decode", *second) as (decode, two),
            serving("kvasir-mini", *flags) as (alone, _),
        ):
            yield Pair(prefill, decode, alone, where if push else "", (one, two))


def ask(pair: Pair, *bodies: dict[str, Any], path: str = "/v1/completions") -> list[list[dict]]:
    """The answers through the proxy and those of the single server, all at once."""

    async def run() -> list[list[dict]]:
        async with (
            httpx.AsyncClient(base_url=pair.prefill) as prefill,
            httpx.AsyncClient(base_url=pair.decode) as decode,
            httpx.AsyncClient(base_url=pair.alone) as alone,
        ):
            proxy = httpx.ASGITransport(toy_proxy(prefill, decode, pair.ask))
            async with httpx.AsyncClient(transport=proxy, base_url="http://proxy") as both:
                posts = (
                    asyncio.gather(*(http.post(path, json=b, timeout=300) for b in bodies)) for http in (both, alone)
                )
                return [[_read(response) for response in await posted] for posted in posts]

    return asyncio.run(run())


def _read(response: httpx.Response) -> dict:
    """The body; of a stream the pieces of each choice, joined."""
    assert response.status_code == 200, response.text
    if not response.text.startswith("data:"):
        return response.json()
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    texts: dict[int, str] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return {"choices": texts, "usage": events[-1]["usage"]}


def same(pair: Pair, *bodies: dict[str, Any], path: str = "/v1/completions", cached: int = 0) -> None:
    """The choices are equal, with log-probabilities where they are asked for, and blocks were taken."""
    for one, other in zip(*ask(pair, *bodies, path=path), strict=True):
        assert one["choices"] == other["choices"]
        assert one["usage"]["completion_tokens"] == other["usage"]["completion_tokens"]
        assert one["usage"]["prompt_tokens_details"]["cached_tokens"] >= cached


def test_completions(pair):
    body = {"prompt": TEXT, "max_tokens": 24, "temperature": 1.0, "seed": 7, "logprobs": 3, "ignore_eos": True}
    prompt = ask(pair, body)[0][0]["usage"]["prompt_tokens"]
    more = {**body, "prompt": "Another. " + TEXT}
    same(pair, more, cached=(prompt - 1) // 16 * 16 - 32)


def test_streams_of_several_choices_at_once(pair):
    bodies = [
        {
            "prompt": f"{number}. {TEXT}", "max_tokens": 20, "temperature": 1.0, "seed": number, "n": 3, "stream": True,
            "stream_options": {"include_usage": True}, "frequency_penalty": 0.5, "ignore_eos": True,
        }
        for number in range(6)
    ]  # fmt: skip
    same(pair, *bodies, cached=16)


def test_chats_with_a_grammar(pair):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    same(
        pair,
        {
            "messages": [{"role": "user", "content": TEXT}], "max_completion_tokens": 40, "temperature": 0.0,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        },
        path="/v1/chat/completions",
        cached=64,
    )  # fmt: skip


@pytest.mark.parametrize("which", [0, 1], ids=["prefill", "decode"])
def test_an_engine_that_dies_between_costs_time_only(pair, which):
    os.kill(engine_pid(pair.processes[which]), signal.SIGKILL)
    same(pair, {"prompt": f"dead {which}. {TEXT}", "max_tokens": 20, "temperature": 0.7, "seed": 3})


def test_an_address_that_only_a_request_names_is_refused(pair):
    params = {"do_remote_prefill": True, "remote_request_id": "x", "remote_host": "example.org", "remote_port": 1}
    body = {"prompt": "a", "max_tokens": 1, "kv_transfer_params": params}
    response = httpx.post(f"{pair.decode}/v1/completions", json=body, timeout=60)
    assert response.status_code == 400 and "example.org" in response.text and "kv_transfer_params" in response.text


def test_one_server_with_roles(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = ("--threads", "1", "--block-size", "16")
    bodies = [
        {"prompt": f"{i}. {TEXT}", "max_tokens": 20, "temperature": 1.0, "seed": i, "logprobs": 2, "ignore_eos": True}
        for i in range(4)
    ]
    with (
        serving("kvasir-mini", *flags, "--prefill-replicas", "1", "--decode-replicas", "1") as (both, _),
        serving("kvasir-mini", *flags) as (alone, _),
    ):
        found = [
            [httpx.post(f"{base}/v1/completions", json=b, timeout=300).json() for b in bodies] for base in (both, alone)
        ]
        for one, other in zip(*found, strict=True):
            assert one["choices"] == other["choices"]
        metrics = httpx.get(f"{both}/metrics").text
        assert 'kvasir_blocks_sent_parts_total{model_name="kvasir-mini",outcome="sent"}' in metrics


@contextmanager
def replica(key: Path, *flags: str) -> Iterator[str]:
    """`kvasir replica` in a process of its own; its address."""
    command = [sys.executable, "-m", "kvasir.cli", "replica", "kvasir-mini", "--port", "0", "--replica-key", str(key)]
    env = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*command, "--threads", "1", "--block-size", "16", *flags], env=env, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout
        yield next(line.split(" at ")[1].strip() for line in process.stdout if " at tcp://" in line)
    finally:
        process.terminate()
        process.communicate(timeout=40)


def test_one_server_before_replicas_with_roles(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key, where = tmp_path / "key", str(tmp_path / "run" / "blocks")
    key.write_text("k" * 32)
    key.chmod(0o600)
    body = {"prompt": TEXT, "max_tokens": 20, "temperature": 1.0, "seed": 1, "logprobs": 2, "ignore_eos": True}
    with (
        replica(key, "--role", "decode", "--transfer-listen", where) as second,
        replica(key, "--role", "prefill", "--transfer-peer", where) as first,
        serving("kvasir-mini", "--replica", first, "--replica", second, "--replica-key", str(key)) as (both, _),
        serving("kvasir-mini", "--threads", "1", "--block-size", "16") as (alone, _),
    ):
        found = [httpx.post(f"{base}/v1/completions", json=body, timeout=300).json() for base in (both, alone)]
        assert found[0]["choices"] == found[1]["choices"]
        metrics = httpx.get(f"{both}/metrics").text
        assert 'kvasir_blocks_sent_parts_total{model_name="kvasir-mini",outcome="sent"}' in metrics
