"""What an operator does to the engines of a server."""

from __future__ import annotations

import asyncio

import pytest

from kvasir.engine.front import Front
from kvasir.fleet.engine import FleetEngine
from kvasir.serve.auth.keys import Key, KeyScope
from kvasir.serve.settings import ServeSettings
from tests.serve.fakes import EchoEngine, byte_tokenizer, template
from tests.serve.running import client

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


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache"])
async def test_only_who_manages_the_server_may(path):
    async with client(KEYS) as http:
        assert (await http.post(path)).status_code == 401
        assert (await http.post(path, headers=bearer("infer-key"))).status_code == 403
        assert (await http.post(path, headers=bearer("manage-key"))).status_code == 200


async def test_a_replica_that_does_not_answer_is_named_in_the_error():
    front = fleet(2)
    async with client(front=front) as http:
        engine = front.engine.replicas[1].engine  # type: ignore[attr-defined]
        await engine.stop()
        engine._info = None  # it starts again
        answer = await http.post("/reset_prefix_cache")
        assert answer.status_code == 503 and "replica 1" in answer.json()["error"]["message"]
        await asyncio.sleep(0)
