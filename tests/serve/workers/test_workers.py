"""A server with three API workers over one engine answers as a server of one process, and counts once."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.serve.test_adapters import written
from tests.serve.test_server import process
from tests.serve.workers.running import folder, running, until

MESSAGES = [{"role": "user", "content": "hello"}]
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "hello", "max_tokens": 12, "logprobs": 2, "temperature": 0}),
    "two choices": ("/v1/completions", {"prompt": "hello", "max_tokens": 9, "n": 2, "seed": 4}),
    "stream": ("/v1/completions", {"prompt": "hello", "max_tokens": 9, "seed": 4, "stream": True}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 12, "seed": 1}),
    "response": ("/v1/responses", {"input": "hello", "max_output_tokens": 12, "temperature": 0}),
    "messages": ("/v1/messages", {"model": "fake", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}),
    "message stream": (
        "/v1/messages",
        {"model": "fake", "messages": MESSAGES, "max_tokens": 5, "temperature": 0, "stream": True},
    ),
    "ollama": ("/api/chat", {"model": "fake", "messages": MESSAGES, "options": {"num_predict": 9, "seed": 1}}),
    "llama.cpp": ("/completion", {"prompt": "hello", "n_predict": 9, "seed": 1}),
    "tgi": ("/generate", {"inputs": "hello", "parameters": {"max_new_tokens": 9, "seed": 1}}),
    "tokens": ("/tokenize", {"content": "hello"}),
    "too long": ("/v1/completions", {"prompt": "hello" * 300}),
    "no json": ("/v1/chat/completions", {"messages": 3}),
    "unknown": ("/v1/nothing", {}),
}
# What differs between two responses: ids, moments, durations.
_OWN = re.compile(r'"(id|item_id|created|created_at|completed_at|request_id|obfuscation|at)":\s*("[^"]*"|[\d.]+)')
_TIMES = re.compile(
    r'"(\w*_(ms|duration|second|per_token_ms|n)|timings|created_at)":\s*("[^"]*"|-?[\d.e+-]+|\{[^}]*\})'
)

_IDS = re.compile(r"(resp|msg|rs|chatcmpl|cmpl)[_-][0-9a-f]{12,}")


def plain(response: httpx.Response) -> tuple[int, str, str]:
    if response.headers["content-type"].startswith("text/event-stream"):  # a busy worker puts tokens together
        text = "".join(re.findall(r'"text": ?"([^"]*)"', response.text)) + response.text[-40:]
    else:
        text = _TIMES.sub("", _OWN.sub("", response.text))
    return response.status_code, response.headers["content-type"], _IDS.sub("", text)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    base = tmp_path_factory.mktemp("server")
    settings = {
        "data_dir": folder(base / "data"),
        "lora_dirs": [folder(base / "loras")],
        "access_log": str(base / "log"),
    }
    with running(3, settings) as server:
        server.base = base
        yield server


@pytest.fixture(scope="module")
def alone():
    with process({}, {}) as (_, url):
        yield url


@pytest.mark.few(4)
@pytest.mark.parametrize("asked", ASKED)
def test_responses_are_those_of_one_process(server, alone, asked):
    path, body = ASKED[asked]
    for _ in range(2):  # the first time nothing is cached
        expected = plain(httpx.post(alone + path, json=body, timeout=60))
    server.post(path, body)
    with ThreadPoolExecutor(6) as threads:
        got = [*threads.map(lambda _: plain(server.post(path, body)), range(6))]
    assert got == [expected] * 6


def test_metrics_are_the_sum_of_all_processes(server):
    labels = {"route": "/v1/completions", "code": "200"}
    before = server.metric("http_requests_total", **labels), server.metric("generated_tokens_total")
    body = {"prompt": "ab", "max_tokens": 5, "temperature": 0}
    with ThreadPoolExecutor(8) as threads:
        assert {r.status_code for r in threads.map(lambda _: server.post("/v1/completions", body), range(24))} == {200}
    server.post("/v1/responses", {"input": "ab", "max_output_tokens": 5, "temperature": 0})
    after = server.metric("http_requests_total", **labels), server.metric("generated_tokens_total")
    assert (after[0] - before[0], after[1] - before[1]) == (24, 25 * 5)
    assert server.metric("http_requests_open") >= 1 and server.metric("requests_open") == 0
    assert server.get("/kvasir/live").json()["latency"]["ttft"]["count"] >= 25


def test_what_is_stored_is_found_by_every_worker(server):
    id = server.post("/v1/responses", {"input": "hello", "max_output_tokens": 4}).json()["id"]
    assert {server.get(f"/v1/responses/{id}").json()["id"] for _ in range(6)} == {id}
    file = httpx.post(f"{server.url}/v1/files", files={"file": b'{"x": 1}\n' * 30000}, data={"purpose": "batch"}).json()
    for _ in range(4):
        assert server.get(f"/v1/files/{file['id']}/content").content == b'{"x": 1}\n' * 30000


def test_adapters_reach_all_workers_before_the_response(server):
    path = written(server.base / "loras", "sql")
    body = {"model": "sql", "prompt": "ab", "max_tokens": 3}
    for _ in range(3):
        assert server.post("/v1/completions", body).status_code == 404
        loaded = server.post("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": path})
        assert loaded.status_code == 200, loaded.text
        assert {server.post("/v1/completions", body).status_code for _ in range(8)} == {200}
        assert all("sql" in [card["id"] for card in server.get("/v1/models").json()["data"]] for _ in range(6))
        assert server.post("/lora-adapters", [{"id": 0, "scale": 0.5}]).status_code == 200
        assert {server.get("/lora-adapters").json()[0]["scale"] for _ in range(8)} == {0.5}
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "sql"}).status_code == 200
        assert {server.post("/v1/completions", body).status_code for _ in range(8)} == {404}


def test_the_page_and_health(server):
    for _ in range(4):
        assert "<html" in server.get("/").text
        assert server.get("/health").json() == {"status": "ok"}
        assert server.get("/kvasir/info").json()["model"] == "fake"
        assert server.get("/openapi.json").status_code == 200


def test_a_request_is_logged_once(server):
    ids = [f"logged-{i}" for i in range(6)]
    for i, id in enumerate(ids):
        path = "/v1/responses" if i % 2 else "/v1/completions"
        server.post(path, {"input" if i % 2 else "prompt": "ab"}, headers={"X-Request-Id": id})

    def lines() -> list[str]:
        found = [json.loads(line) for line in (server.base / "log").read_text().splitlines()]
        return sorted(line["request_id"] for line in found if (line["request_id"] or "").startswith("logged-"))

    deadline = threading.Event()
    for _ in range(200):
        if lines() == ids:
            return
        deadline.wait(0.05)
    assert lines() == ids


def test_clients_that_leave_free_their_requests(server):
    """Those of workers, and relayed ones."""
    for path, field in (("/v1/completions", "prompt"), ("/v1/responses", "input")):
        body = {field: "ab", "stream": True, "ignore_eos": True}
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                response = stack.enter_context(httpx.stream("POST", server.url + path, json=body, timeout=60))
                next(response.iter_lines())
        for _ in range(500):
            live = server.get("/kvasir/live").json()
            if not live["answers"]:
                break
            threading.Event().wait(0.02)
        assert not live["answers"]


def test_a_request_of_any_worker_is_aborted():
    with running(3, step_seconds=0.01) as server, ThreadPoolExecutor(8) as pool:
        body = {"prompt": "hello", "max_tokens": 400, "temperature": 0}

        def asked(number: int) -> httpx.Response:
            return server.post("/v1/completions", body, headers={"x-request-id": f"mine-{number}"})

        streams = [pool.submit(asked, i) for i in range(6)]
        for i in range(6):
            until(lambda i=i: server.post("/abort_request", {"rid": f"mine-{i}"}).json()["aborted"] == 1)
        assert [stream.result().status_code for stream in streams] == [499] * 6


def test_the_prefix_cache_is_reset_through_any_worker(server):
    body = {"prompt": "a prompt of several blocks of the cache " * 3, "max_tokens": 2, "temperature": 0}
    server.post("/v1/completions", body)
    assert server.post("/reset_prefix_cache", None).json()["freed_blocks"] > 0
    usage = server.post("/v1/completions", body).json()["usage"]
    assert not (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
