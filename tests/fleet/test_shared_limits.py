"""Limits, classes and shares of keys hold over all replicas, and over several servers in front of them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import httpx
import pytest

from kvasir.engine.fake import FakeEngine
from kvasir.engine.front import Front
from kvasir.engine.host import EngineHost
from kvasir.engine.remote import HostAddress, RemoteEngine
from kvasir.fleet.engine import FleetEngine
from kvasir.serve.app import create_app
from kvasir.serve.auth.keys import Key, KeyLimits
from kvasir.serve.hosting.catalogue import OneModel
from kvasir.serve.settings import ServeSettings
from kvasir.types import ServiceClass
from tests.fleet.test_remote import FAKE
from tests.sched.drive import request
from tests.serve.fakes import EchoEngine, byte_tokenizer, template

BODY = {"prompt": "abc", "max_tokens": 2, "temperature": 0}


async def ends(fleet: FleetEngine, flood: list, others: list) -> tuple[int, int]:
    """How many requests of the flood end while the others are served, and how many in all. The flood comes first."""
    ended = 0

    async def one(asked) -> None:
        nonlocal ended
        async for _ in fleet.submit(asked):
            pass
        ended += asked in flood

    noise = [asyncio.ensure_future(one(asked)) for asked in flood]
    while not any(replica.rows for replica in fleet.replicas):
        await asyncio.sleep(0.001)
    before = ended
    await asyncio.gather(*(one(asked) for asked in others))
    meanwhile = ended - before
    await asyncio.gather(*noise)
    return meanwhile, ended


@pytest.mark.parametrize("kind", ["key", "class"])
async def test_a_flood_of_one_key_does_not_delay_another_on_any_replica(kind):
    fleet = FleetEngine(lambda i: FakeEngine(**{**FAKE, "max_rows": 4, "step_seconds": 0.001}), 2)
    await fleet.start()
    try:
        slo = ServiceClass.BACKGROUND if kind == "class" else ServiceClass.INTERACTIVE
        asked = [request(f"r{i}", [i], max_tokens=30, seed=i) for i in range(64)]
        flood = [replace(one, tenant="loud", slo=slo) for one in asked[:60]]
        others = [replace(one, tenant="quiet") for one in asked[60:]]
        meanwhile, all_of_them = await ends(fleet, flood, others)
        assert all_of_them == 60 and meanwhile <= 24, "the others waited for the flood"
    finally:
        await fleet.stop()


def settings(**more) -> ServeSettings:
    limits = KeyLimits(requests_per_minute=6, concurrent=4)
    return ServeSettings(keys=(Key("a-secret", "few", limits=limits), Key("b-secret", "free")), **more)


async def test_servers_in_front_of_the_same_replicas_divide_the_limits_of_a_key(tmp_path):
    async with AsyncExitStack() as stack:
        engine = EchoEngine()
        await engine.start()
        stack.push_async_callback(engine.stop)
        host = EngineHost(engine)
        tmp_path.chmod(0o700)
        await host.listen_unix(tmp_path / "s")
        stack.push_async_callback(host.close)
        answers: dict[str, list[httpx.Response]] = {"a-secret": [], "b-secret": []}
        for _ in range(2):
            fleet = FleetEngine(lambda i: RemoteEngine(HostAddress(tmp_path / "s")), 1)
            front = Front(fleet, byte_tokenizer(), template())
            await front.start()
            stack.push_async_callback(front.stop)
            transport = httpx.ASGITransport(create_app(OneModel(front, settings(routers=2))))
            http = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://localhost"))
            for secret, found in answers.items():
                for _ in range(6):
                    headers = {"Authorization": f"Bearer {secret}"}
                    found.append(await http.post("/v1/completions", json=BODY, headers=headers))
        assert [r.status_code for r in answers["a-secret"]] == [*[200] * 3, *[429] * 3] * 2
        assert answers["a-secret"][0].headers["x-ratelimit-limit-requests"] == "3"
        assert {r.status_code for r in answers["b-secret"]} == {200}


def test_a_share_is_at_least_one():
    limits = KeyLimits(requests_per_minute=3, tokens_per_minute=100, concurrent=None)
    assert limits.divided(1) == limits
    assert limits.divided(4) == KeyLimits(requests_per_minute=1, tokens_per_minute=25)
