"""Adapters of a fleet: names for all replicas, also for those that come later; streams keep the content they began
with, wherever they go on."""

from __future__ import annotations

import asyncio

import pytest

from kvasir.engine.fake import FakeEngine
from kvasir.errors import InvalidRequest, ModelNotFound
from kvasir.fleet.adapters import FleetAdapters
from kvasir.inputs import Adapter
from tests.engine.hosting import Hosted
from tests.engine.test_adapters import answer_of, ask, written
from tests.engine.test_process import collect, until
from tests.fleet.fleets import all_ready, kill, running

SIZES = {"max_loras": 4, "step_seconds": 0.004}


def names(replica) -> list[tuple[str, str]]:
    return [(info.name, info.content) for info in replica.engine.adapters]


@pytest.mark.slow
async def test_all_replicas_have_the_names(tmp_path):
    async with running(2, most=3, **SIZES) as engine:
        x = await engine.load_adapter("x", written(tmp_path, "x"), pinned=True)
        y = await engine.load_adapter("y", written(tmp_path, "y"))
        with pytest.raises(InvalidRequest, match="loaded already"):
            await engine.load_adapter("x", written(tmp_path, "x"))
        with pytest.raises(Exception, match="nowhere"):
            await engine.load_adapter("z", str(tmp_path / "nowhere"))
        assert engine.adapters == (x, y) and (await engine.stats()).adapters_registered == 2
        kill(engine.replicas[0])
        await engine.restart_replica(1)
        await engine.scale(3)
        await all_ready(engine)
        await engine.unload_adapter("y")
        assert [names(r) for r in engine.replicas] == [[("x", x.content)]] * 3
        asked = [ask(f"r{i}", Adapter("x", 1.0 + i)) for i in range(6)]
        answers = await asyncio.gather(*(collect(engine, r) for r in asked))
        assert answers == [{0: answer_of(r, x)} for r in asked]
        with pytest.raises(ModelNotFound):
            await collect(engine, ask("no", Adapter("y")))


async def test_a_stream_keeps_its_adapter_on_another_replica(tmp_path):
    async with running(2, **SIZES) as engine:
        old = await engine.load_adapter("x", written(tmp_path, "old"))
        asked = ask("a", Adapter("x"), tokens=80)
        task = asyncio.create_task(collect(engine, asked, got := {}))
        await until(lambda: got)
        new = await engine.load_adapter("x", written(tmp_path, "new"), replace=True)
        assert new.content != old.content
        (home,) = (r for r in engine.replicas if r.open)
        kill(home)
        assert await asyncio.wait_for(task, 60) == {0: answer_of(asked, old)}
        after = ask("b", Adapter("x"))
        assert await collect(engine, after) == {0: answer_of(after, new)}


async def test_an_engine_that_leaves_does_not_keep_the_others_from_unloading(tmp_path):
    engines = [
        Hosted(FakeEngine(vocab_size=256, num_blocks=50, max_rows=4, max_model_len=512, max_loras=4)) for _ in "ab"
    ]
    adapters = FleetAdapters(lambda: engines)
    for engine in engines:
        await engine.start()
    try:
        await adapters.load("x", written(tmp_path, "x"), replaces=False, pinned=False)
        await engines[0].host.close()
        await adapters.unload("x")
        assert engines[1].adapters == () and adapters.names.all == ()
    finally:
        for engine in engines:
            await engine.stop()
