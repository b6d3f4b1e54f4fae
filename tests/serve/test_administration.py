"""What an operator does to the engines of a server."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from kvasir.engine.front import Front
from kvasir.engine.subprocess import ProcessEngine
from kvasir.fleet.engine import FleetEngine
from kvasir.serve.auth.keys import Key, KeyScope
from kvasir.serve.settings import ServeSettings
from tests.serve.fakes import EchoEngine, byte_tokenizer, template
from tests.serve.running import client, live

LONG = "a prompt that is long enough for some blocks of the cache to be full, and then some more of it"
BODY = {"prompt": LONG, "max_tokens": 3, "temperature": 0}
KEYS = ServeSettings(
    keys=(
        Key("infer-key", "infers"),
        Key("other-key", "infers-too"),
        Key("manage-key", "manages", scopes=frozenset((KeyScope.MANAGEMENT,))),
    )
)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def fleet(count: int = 2, **runner) -> Front:
    return Front(FleetEngine(lambda i: EchoEngine(**runner), count, policy="round-robin"), byte_tokenizer(), template())


async def cached(http) -> int:
    usage = (await http.post("/v1/completions", json=BODY)).json()["usage"]
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache", "/reset_prefix_cache?model=fake"])
@pytest.mark.parametrize("replicas", [1, 2])
async def test_the_prefix_cache_is_reset_in_all_replicas(path, replicas):
    async with client(front=fleet(replicas)) as http:
        for _ in range(2 * replicas):
            await cached(http)
        assert await cached(http) > 0
        answer = await http.post(path)
        assert answer.status_code == 200 and answer.json()["freed_blocks"] > 0
        assert [await cached(http) for _ in range(replicas)] == [0] * replicas
        assert (await http.post(path)).json()["freed_blocks"] > 0


async def test_what_a_reset_cannot_do_is_refused(http):
    for name in ("reset_running_requests", "reset_external"):
        assert (await http.post(f"/reset_prefix_cache?{name}=false")).status_code == 200
        answer = await http.post(f"/reset_prefix_cache?{name}=true")
        assert answer.status_code == 400 and name in answer.json()["error"]["message"]
    assert (await http.post("/reset_prefix_cache?reset_external=maybe")).status_code == 400
    assert (await http.post("/reset_prefix_cache?model=nothing")).status_code == 404
    assert (await http.get("/reset_prefix_cache")).status_code == 405


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache", "/abort_request"])
async def test_only_who_manages_the_server_may(path):
    async with client(KEYS) as http:
        body = {"rid": "x"}
        assert (await http.post(path, json=body)).status_code == 401
        assert (await http.post(path, json=body, headers=bearer("infer-key"))).status_code == 403
        assert (await http.post(path, json=body, headers=bearer("manage-key"))).status_code == 200


async def test_a_replica_that_does_not_answer_is_named_in_the_error():
    front = fleet(2)
    async with client(front=front) as http:
        engine = front.engine.replicas[1].engine  # type: ignore[attr-defined]
        await engine.stop()
        engine._info = None  # it starts again
        answer = await http.post("/reset_prefix_cache")
        assert answer.status_code == 503 and "replica 1" in answer.json()["error"]["message"]
        await asyncio.sleep(0)


SLOW = {"prompt": "hello", "max_tokens": 400, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 400, "temperature": 0}
GENERATING = {
    "completion": ("/v1/completions", SLOW),
    "choices": ("/v1/completions", {**SLOW, "n": 3, "temperature": 1}),
    "prompts": ("/v1/completions", {**SLOW, "prompt": ["a", "b"]}),
    "chat": ("/v1/chat/completions", CHAT),
    "response": ("/v1/responses", {"input": "hello", "max_output_tokens": 400}),
    "message": ("/v1/messages", {**CHAT, "model": "fake"}),
    "ollama": ("/api/chat", {"model": "fake", "messages": CHAT["messages"], "stream": False}),
    "llama.cpp": ("/completion", {"prompt": "hello", "n_predict": 400}),
    "tgi": ("/generate", {"inputs": "hello", "parameters": {"max_new_tokens": 400}}),
}


async def until_open(http, count: int = 1) -> None:
    while (await http.front.stats()).running < count:
        await asyncio.sleep(0.005)


@pytest.mark.few(2)
@pytest.mark.parametrize("what", GENERATING)
@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_request_is_aborted_by_the_id_that_its_client_chose(what, replicas):
    path, body = GENERATING[what]
    async with client(front=fleet(replicas, step_seconds=0.005)) as http:
        mine = asyncio.ensure_future(http.post(path, json=body, headers={"x-request-id": "mine"}))
        await until_open(http)
        other = asyncio.ensure_future(http.post("/v1/completions", json={**SLOW, "max_tokens": 9}))
        assert (await http.post("/abort_request", json={"rid": "nothing"})).json()["aborted"] == 0
        answer = await http.post("/abort_request", json={"rid": "mine"})
        assert answer.status_code == 200 and answer.json()["aborted"] == 1
        ended = await mine
        assert ended.status_code == (499 if what != "ollama" else ended.status_code)
        assert "aborted" in ended.text
        assert (await other).status_code == 200
        assert len(http.app.state.open_requests) == 0  # type: ignore[attr-defined]


def test_a_stream_is_aborted_by_the_id_of_its_response():
    with live(step_seconds=0.005) as server:
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            lines = response.iter_lines()
            id = next(lines).split('"id":"')[1].split('"')[0]
            assert abort(server, id) == 1
            rest = "".join(lines)
        assert "request_aborted" in rest and "[DONE]" not in rest
        assert abort(server, id) == 0


def test_a_continued_stream_is_aborted():
    """Its request has another id in the engine."""
    with live(step_seconds=0.005) as server:
        body, path = {**SLOW, "stream": True}, f"{server.url}/v1/completions"
        with httpx.stream("POST", path, json=body, headers={"x-kvasir-event-ids": "1"}) as response:
            place = next(response.iter_lines()).removeprefix("id: ")
        again = {"last-event-id": place, "x-request-id": "again"}
        with httpx.stream("POST", path, json=body, headers=again) as response:
            lines = response.iter_lines()
            next(lines)
            assert abort(server, "again") == 1
            assert "request_aborted" in "".join(lines)


def abort(server, rid: str) -> int:
    return httpx.post(f"{server.url}/abort_request", json={"rid": rid}).json()["aborted"]


async def test_all_requests_are_aborted_at_once():
    async with client(step_seconds=0.005) as http:
        asked = [asyncio.ensure_future(http.post("/v1/completions", json=SLOW)) for _ in range(3)]
        await until_open(http, 3)
        assert (await http.post("/abort_request", json={"abort_all": True})).json()["aborted"] == 3
        assert [(await one).status_code for one in asked] == [499] * 3


async def test_an_abort_names_what_it_aborts(http):
    for body in ({}, {"rid": ""}, {"rid": 3}, {"abort_all": "yes"}):
        assert (await http.post("/abort_request", json=body)).status_code == 400


SLEEPY = {"vocab_size": 260, "num_blocks": 200, "max_rows": 16, "max_model_len": 512, "step_seconds": 0.004}


def sleepy(replicas: int = 0) -> Front:
    """The front of an engine in processes of its own, as servers have it."""
    make = lambda i: ProcessEngine(fake=SLEEPY, hands_over=bool(replicas))  # noqa: E731
    return Front(FleetEngine(make, replicas) if replicas else make(0), byte_tokenizer(), template())


@pytest.mark.parametrize("replicas", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("down", "up"),
    [
        ("/sleep?level=2", "/wake_up?tags=weights&tags=kv_cache"),
        pytest.param("/release_memory_occupation", "/resume_memory_occupation", marks=pytest.mark.slow),
    ],
)
async def test_a_model_sleeps_until_it_is_woken(replicas, down, up):
    async with client(front=sleepy(replicas)) as http:
        body = {"tags": ["weights"]} if "memory" in down else None
        expected = (await http.post("/v1/completions", json=BODY)).json()["choices"]
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": False}
        assert (await http.post(down, json=body)).status_code == 200
        assert (await http.get("/is_sleeping?model=fake")).json() == {"is_sleeping": True}
        assert (await http.get("/health")).json() == {"status": "ok"}
        assert (await http.get("/metrics")).status_code == 200
        for path, asked in (("/v1/completions", BODY), ("/reset_prefix_cache", None)):
            answer = await http.post(path, json=asked)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "asleep"
        assert (await http.post("/tokenize", json={"prompt": "a"})).json()["count"] == 1
        for _ in range(2):
            assert (await http.post(up, json=body)).status_code == 200
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": False}
        assert (await http.post("/v1/completions", json=BODY)).json()["choices"] == expected


@pytest.mark.parametrize(("mode", "status"), [("abort", 503), ("wait", 200)])
async def test_what_becomes_of_requests_under_way(mode, status):
    async with client(front=sleepy()) as http:
        asked = asyncio.ensure_future(http.post("/v1/completions", json={**SLOW, "max_tokens": 60}))
        await until_open(http)
        assert (await http.post(f"/sleep?mode={mode}")).status_code == 200
        assert (await asked).status_code == status
        await http.post("/wake_up")


async def test_what_sleep_does_not_do_is_refused(http):
    for path in ("/sleep?level=0", "/sleep?mode=keep", "/sleep?level=x", "/wake_up?tags=nothing"):
        assert (await http.post(path)).status_code == 400, path
    assert (await http.post("/sleep?model=nothing")).status_code == 404
    assert (await http.get("/is_sleeping?model=nothing")).status_code == 404


@pytest.mark.parametrize("path", ["/sleep", "/wake_up"])
async def test_only_who_manages_the_server_puts_it_to_sleep(path):
    async with client(KEYS) as http:
        assert (await http.post(path, headers=bearer("infer-key"))).status_code == 403
        assert (await http.post(path, headers=bearer("manage-key"))).status_code == 200
        assert (await http.post("/wake_up", headers=bearer("manage-key"))).status_code == 200
        assert (await http.get("/is_sleeping", headers=bearer("infer-key"))).status_code == 200
