"""Limits, classes and shares of keys hold over all replicas, and over several servers in front of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace

import httpx
import msgspec
import pytest

from kvasir.engine.fake import FakeEngine
from kvasir.engine.front import Front
from kvasir.engine.host import EngineHost
from kvasir.engine.remote import HostAddress, RemoteEngine
from kvasir.fleet.engine import FleetEngine
from kvasir.serve.app import create_app
from kvasir.serve.auth.keys import Key, KeyLimits
from kvasir.serve.auth.sharing import TELL_SECONDS, SharingQuotas
from kvasir.serve.hosting.catalogue import OneModel
from kvasir.serve.http.asgi import settle
from kvasir.serve.settings import ServeSettings
from kvasir.types import ServiceClass
from tests.cli.test_replica import command, key  # noqa: F401
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
    tokens = Key("c-secret", "tokens", limits=KeyLimits(tokens_per_minute=60))
    return ServeSettings(keys=(Key("a-secret", "few", limits=limits), Key("b-secret", "free"), tokens), **more)


@asynccontextmanager
async def servers(folder, count: int, exchange: bool = True) -> AsyncIterator[list[httpx.AsyncClient]]:
    """So many servers in front of one replica behind a host, each of which knows that there are as many."""
    async with AsyncExitStack() as stack:
        engine = EchoEngine()
        await engine.start()
        stack.push_async_callback(engine.stop)
        host = EngineHost(engine)
        folder.chmod(0o700)
        await host.listen_unix(folder / "s")
        stack.push_async_callback(host.close)
        found, quotas = [], []
        for _ in range(count):
            front = Front(
                FleetEngine(lambda i: RemoteEngine(HostAddress(folder / "s")), 1), byte_tokenizer(), template()
            )
            await front.start()
            stack.push_async_callback(front.stop)
            catalogue = OneModel(front, settings(routers=count))
            if exchange:
                assert isinstance(catalogue.quotas, SharingQuotas)
                quotas.append(catalogue.quotas)
                sharing = asyncio.ensure_future(catalogue.quotas.share(lambda front=front: [front.engine]))
                stack.push_async_callback(settle, sharing)
            transport = httpx.ASGITransport(create_app(catalogue))
            http = httpx.AsyncClient(transport=transport, base_url="http://localhost")
            found.append(await stack.enter_async_context(http))
        while not all(each.peers.complete for each in quotas):
            await asyncio.sleep(0.005)
        yield found


async def asked(http: httpx.AsyncClient, secret: str, times: int = 6, **more) -> list[httpx.Response]:
    headers = {"Authorization": f"Bearer {secret}"}
    return [await http.post("/v1/completions", json=BODY | more, headers=headers) for _ in range(times)]


async def test_the_limits_of_a_key_hold_over_servers_and_one_of_them_can_use_all(tmp_path):
    async with servers(tmp_path, 3) as (one, two, three):
        first = await asked(one, "a-secret", 7)
        assert [r.status_code for r in first] == [*[200] * 6, 429]
        assert first[0].headers["x-ratelimit-limit-requests"] == "6"
        assert {r.status_code for r in await asked(one, "b-secret")} == {200}
        await asyncio.sleep(0.1)
        assert [r.status_code for http in (two, three) for r in await asked(http, "a-secret", 2)] == [429] * 4


async def test_tokens_count_over_servers_too(tmp_path):
    async with servers(tmp_path, 2) as (one, two):
        found = await asked(one, "c-secret", 3, prompt="x" * 20)
        await asyncio.sleep(0.6)
        found += await asked(two, "c-secret", 1, prompt="x" * 20)
        assert [r.status_code for r in found] == [200, 200, 429, 429]


async def test_servers_that_do_not_hear_each_other_divide_the_limits_of_a_key(tmp_path):
    async with servers(tmp_path, 2, exchange=False) as https:
        answers = [await asked(http, "a-secret") for http in https]
        assert [[r.status_code for r in each] for each in answers] == [[*[200] * 3, *[429] * 3]] * 2
        assert answers[0][0].headers["x-ratelimit-limit-requests"] == "3"
        assert {r.status_code for http in https for r in await asked(http, "b-secret")} == {200}


def test_what_cannot_be_read_changes_nothing():
    quotas = SharingQuotas(settings().all_keys, 2)
    for data in (b"", b"\xff", b"\x95", msgspec.msgpack.encode(["x", -1, 0, {}, {}]), msgspec.msgpack.encode([1] * 5)):
        quotas.receive(data)
    quotas.receive(
        msgspec.msgpack.encode(["x", 1, 1, {"y": 3}, {"few/requests": [2, 1, 2], "nobody/tokens": [1, 0, 0]}])
    )
    assert quotas.peers.complete and quotas.accounts["few"].buckets[0].room == 4


def test_a_share_is_at_least_one():
    limits = KeyLimits(requests_per_minute=3, tokens_per_minute=100, concurrent=None)
    assert limits.divided(1) == limits
    assert limits.divided(4) == KeyLimits(requests_per_minute=1, tokens_per_minute=25)


@pytest.mark.slow
def test_real_servers_share_the_limits_of_a_key(key, tmp_path):  # noqa: F811
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps([{"name": "few", "key": "a-secret-of-mine", "limits": {"requests_per_minute": 6}}]))
    keys.chmod(0o600)
    with ExitStack() as stack:
        small = ("kvasir-mini", "--threads", "1", "--num-blocks", "60")
        _, replica = stack.enter_context(command("replica", *small, "--replica-key", key, "--port", "0"))
        front = ("serve", "kvasir-mini", "--port", "0", "--replica", replica, "--replica-key", key, "--keys", str(keys))
        servers = [
            stack.enter_context(command(*front, "--routers", "2", *more))[1] for more in ((), ("--api-workers", "2"))
        ]
        time.sleep(2 * TELL_SECONDS)

        def ask(url: str) -> httpx.Response:
            headers = {"Authorization": "Bearer a-secret-of-mine"}
            return httpx.post(f"{url}/v1/completions", json=BODY, headers=headers, timeout=60)

        busy, idle = servers[::-1]  # the one with API workers
        first = [ask(busy) for _ in range(7)]
        assert [r.status_code for r in first] == [*[200] * 6, 429]
        assert first[5].headers["x-ratelimit-limit-requests"] == "6"
        time.sleep(2 * TELL_SECONDS)
        assert ask(idle).status_code == 429
