"""Models of a server of several that are put to sleep."""

from __future__ import annotations

import asyncio

import pytest

from kvasir.errors import EngineAsleep, EngineDead, ModelNotFound
from tests.serve.hosting.test_several import until
from tests.serve.shelf import Launcher, several


async def touch(catalogue, name: str) -> None:
    async with catalogue.lease(name):
        pass


async def test_a_sleeping_model_is_not_loaded_until_it_is_woken():
    launcher = Launcher()
    async with several(launcher) as catalogue:
        for name in ("a", "b"):
            await touch(catalogue, name)
        await catalogue.sleep("a", 0.0)
        assert launcher.there == ["b"]
        assert await catalogue.is_sleeping("a") and await catalogue.is_sleeping(None)
        assert not await catalogue.is_sleeping("b")
        with pytest.raises(EngineAsleep, match="'a' is asleep"):
            await touch(catalogue, "a")
        await touch(catalogue, "b")
        await catalogue.wake_up("a")
        assert sorted(launcher.there) == ["a", "b"] and not await catalogue.is_sleeping(None)


async def test_all_loaded_models_sleep_and_come_back_and_no_others():
    launcher = Launcher()
    async with several(launcher) as catalogue:
        for name in ("a", "b"):
            await touch(catalogue, name)
        await catalogue.sleep(None, 0.0)
        assert launcher.there == []
        await catalogue.sleep("a", 0.0)
        await touch(catalogue, "c")
        await catalogue.wake_up(None)
        assert sorted(launcher.there) == ["a", "b", "c"] and launcher.loads == 5


async def test_a_model_that_is_not_loaded_sleeps_too():
    launcher = Launcher()
    async with several(launcher) as catalogue:
        await catalogue.sleep("a", 0.0)
        with pytest.raises(EngineAsleep):
            await touch(catalogue, "a")
        await catalogue.wake_up(None)
        assert launcher.loads == 0, "it was not loaded before"
        await touch(catalogue, "a")
        with pytest.raises(ModelNotFound):
            await catalogue.sleep("z", 0.0)
        with pytest.raises(ModelNotFound):
            await catalogue.wake_up("z")


@pytest.mark.parametrize("drain", [0.0, 30.0])
async def test_requests_under_way_have_some_time(drain):
    launcher = Launcher()
    async with several(launcher) as catalogue:
        lease = catalogue.lease("a")
        serving = await lease.__aenter__()
        falling = asyncio.ensure_future(catalogue.sleep("a", drain))
        await asyncio.sleep(0.05)
        assert falling.done() == serving.front.engine.ended == (not drain)
        await lease.__aexit__(None, None, None)
        await asyncio.wait_for(falling, 10)
        assert launcher.there == []


async def test_a_model_that_is_being_loaded_falls_asleep():
    gate = asyncio.Event()
    launcher = Launcher(gate=gate)
    async with several(launcher) as catalogue:
        asked = asyncio.ensure_future(touch(catalogue, "a"))
        await until(lambda: launcher.loads)
        falling = asyncio.ensure_future(catalogue.sleep("a", 0.0))
        await asyncio.sleep(0.01)
        gate.set()
        await asyncio.wait_for(falling, 10)
        await asyncio.gather(asked, return_exceptions=True)
        assert launcher.there == []


async def test_a_model_that_cannot_be_loaded_again_is_awake():
    launcher = Launcher()
    async with several(launcher) as catalogue:
        await touch(catalogue, "a")
        await catalogue.sleep(None, 0.0)
        launcher.failing["a"] = EngineDead("no memory")
        with pytest.raises(EngineDead, match="no memory"):
            await catalogue.wake_up(None)
        launcher.failing.clear()
        await touch(catalogue, "a")
