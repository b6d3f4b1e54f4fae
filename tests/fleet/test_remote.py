"""A fleet whose replicas are served by other processes: what its clients see when hosts die, leave and come back."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from kvasir.engine.fake import FakeEngine
from kvasir.engine.host import EngineHost
from kvasir.engine.remote import HostAddress, RemoteEngine
from kvasir.errors import ConfigError
from kvasir.fleet.engine import FleetEngine
from tests.engine.test_process import collect, expected, until
from tests.sched.drive import request

FAKE = {"vocab_size": 256, "num_blocks": 200, "max_rows": 16, "max_model_len": 512}


class There:
    """A host and its engine, which can be killed and started again."""

    def __init__(self, path, **more):
        self.path, self.more = path, more

    async def start(self) -> None:
        self.engine = FakeEngine(**{**FAKE, "step_seconds": 0.002, **self.more})
        await self.engine.start()
        self.host = EngineHost(self.engine)
        self.path.unlink(missing_ok=True)
        await self.host.listen_unix(self.path)

    async def end(self, drain: float = 0.0) -> None:
        await self.host.close(drain)
        await self.engine.stop()


@asynccontextmanager
async def fleet_of(folder, count: int = 2, **more):
    there = [There(folder / f"s{i}", **more) for i in range(count)]
    async with AsyncExitStack() as stack:
        for one in there:
            await one.start()
            stack.push_async_callback(one.end)
        fleet = FleetEngine(lambda i: RemoteEngine(HostAddress(there[i].path)), count)
        await fleet.start()
        stack.push_async_callback(fleet.stop)
        yield fleet, there


def asked(count: int, length: int = 150):
    return [
        request(f"r{i}", [i, 1], max_tokens=length, n=1 + i % 2, seed=i, temperature=1.0, ignore_eos=True)
        for i in range(count)
    ]


@pytest.mark.parametrize("drain", [0.0, 0.1, 60.0])
async def test_streams_survive_hosts_that_leave(tmp_path, drain):
    async with fleet_of(tmp_path) as (fleet, there):
        got: list[dict] = [{} for _ in range(8)]
        requests = asked(8)
        tasks = [asyncio.create_task(collect(fleet, one, some)) for one, some in zip(requests, got, strict=True)]
        await until(lambda: all(got))
        assert all(len(replica.open) for replica in fleet.replicas)
        await there[0].end(drain)
        assert await asyncio.gather(*tasks) == [expected(one) for one in requests]
        assert await collect(fleet, new := asked(1)[0]) == expected(new)


async def test_a_host_that_comes_back_gets_requests_again(tmp_path):
    async with fleet_of(tmp_path) as (fleet, there):
        for one in asked(4, 20):
            assert await collect(fleet, one) == expected(one)
        await asyncio.sleep(0.6)  # a report of each replica
        before = (await fleet.stats()).generated_tokens
        assert before == 6 * 20
        for one in there:
            await one.end()
            await one.start()
        await until(lambda: all(replica.takes for replica in fleet.replicas))
        requests = asked(6, 20)
        assert await asyncio.gather(*(collect(fleet, one) for one in requests)) == [expected(one) for one in requests]
        await asyncio.sleep(0.6)
        assert (await fleet.stats()).generated_tokens == before + 9 * 20, "counters never decrease"


async def test_hosts_of_different_models_are_no_fleet(tmp_path):
    there = [There(tmp_path / "a"), There(tmp_path / "b", vocab_size=300)]
    for one in there:
        await one.start()
    with pytest.raises(ConfigError, match="vocab_size"):
        await FleetEngine(lambda i: RemoteEngine(HostAddress(there[i].path)), 2).start()
    for one in there:
        await one.end()
