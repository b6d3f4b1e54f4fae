"""Engines that publish KV cache events: a subscriber knows what the cache holds, across restarts, and in fleets."""

from __future__ import annotations

import os
import random
import signal
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kvasir.engine.core import EngineCore
from kvasir.engine.kv_events import KvEvents, KvEventsConfig
from kvasir.engine.publishing import PublishingEngine
from kvasir.engine.subprocess import ProcessEngine
from kvasir.errors import ConfigError
from kvasir.fleet.engine import FleetEngine
from kvasir.inputs import Adapter, Inputs, Span, marks
from kvasir.runner.fake import FakeRunner
from kvasir.sched.scheduler import Scheduler
from tests.engine.kv_subscriber import Subscriber
from tests.engine.test_adapter_names import written
from tests.engine.test_process import FAKE, collect, until
from tests.sched.drive import request
from tests.sched.inputs import CONTENTS, sources_of

HERE = KvEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:0", replay_endpoint="tcp://*:0")
SMALL = {**FAKE, "step_seconds": 0.0, "block_size": 8, "num_blocks": 60, "max_loras": 4}


def engine(events: KvEvents, **more) -> PublishingEngine:
    return PublishingEngine(fake=SMALL, events=events, patient=True, **more)


@asynccontextmanager
async def followed(config: KvEventsConfig = HERE):
    """(a started engine, its publisher, a subscriber)"""
    events = KvEvents(config)
    started = engine(events)
    await started.start()
    reader = Subscriber.of(events)
    try:
        yield started, events, reader
    finally:
        reader.close()
        await started.stop()


async def settled(started, reader: Subscriber) -> None:
    """Returns when the subscriber knows all changes: an engine answers after it has reported them."""
    await started.check()
    await reader.catch_up()


async def holds(started, ids: list[int]) -> int:
    """Tokens of a prompt that the engine finds in its cache."""
    deltas = [d async for d in started.submit(request(f"ask-{random.random()}", ids, max_tokens=1))]
    return deltas[0].cached_tokens


async def test_a_subscriber_knows_what_the_cache_holds():
    """With evictions; what it predicts for a prompt is found."""
    async with followed() as (started, events, reader):
        rng = random.Random(3)
        texts = [[rng.randrange(250) for _ in range(120)] for _ in range(6)]
        removed = False
        for _ in range(25):
            ids = rng.choice(texts)[: rng.randint(9, 120)]
            known = reader.mirror.prefixes()
            expected = max(n for n in range(0, len(ids), 8) if not n or tuple(ids[:n]) in known)
            assert expected <= await holds(started, ids) < expected + 8
            before = set(reader.mirror.blocks)
            await settled(started, reader)
            removed |= not before <= set(reader.mirror.blocks)
        stats = await started.stats()
        assert removed and stats.event_batches == events.published == reader.mirror.number + 1
        assert stats.event_batches_dropped == 0 and (await started.look()).stats.event_batches == events.published
        late = Subscriber.of(events)
        await late.catch_up()
        assert late.mirror.blocks == reader.mirror.blocks
        late.close()


async def test_adapters_salts_and_images_are_in_hashes_and_extra_keys(tmp_path):
    async with followed() as (started, _, reader):
        await started.load_adapter("x", written(tmp_path, "x"))
        ids = list(range(100, 124))
        image = Inputs((Span(10, 4, CONTENTS[0], 0),))
        asked = {
            "plain": {},
            "salt": {"cache_salt": "0:secret"},
            "adapter": {"adapters": (Adapter("x"),)},
            "scaled": {"adapters": (Adapter("x", 0.5),), "cache_salt": "0:s"},
            "late": {"adapters": (Adapter("x", start=12),), "cache_salt": "0:l"},
            "image": {"inputs": image, "sources": sources_of(image)},
            "encoded": {"inputs": Inputs(encoded=CONTENTS[1]), "sources": sources_of(Inputs(encoded=CONTENTS[1]))},
        }
        found, seen = {}, set()
        for name, more in asked.items():
            await collect(started, replace(request(name, ids, max_tokens=1), **more))
            await settled(started, reader)
            new = [value for one, value in reader.mirror.blocks.items() if one not in seen]
            seen |= set(reader.mirror.blocks)
            found[name] = [(own, extra, lora) for _, own, extra, lora in new]
        blocks = [tuple(ids[i : i + 8]) for i in (0, 8, 16)]
        mark = [marks(image, ())[10].hex(), 2]
        assert found["plain"] == [(own, None, None) for own in blocks]
        assert found["salt"] == [(blocks[0], ["secret"], None), *((own, None, None) for own in blocks[1:])]
        assert found["adapter"] == [(own, ["x"], "x") for own in blocks]
        assert [extra for _, extra, _ in found["scaled"]] == [["x:0.5", "s"], ["x:0.5"], ["x:0.5"]]
        (begin, (own, (late,), lora), last) = found["late"]
        assert begin == (blocks[0], ["l"], None) and last == (blocks[2], None, None)
        assert (own, lora, late[1]) == (blocks[1], None, 4)
        assert found["image"] == [(blocks[1], [mark], None), (blocks[2], None, None)], "the first block is shared"
        (first, *rest) = (extra for _, extra, _ in found["encoded"])
        assert len(first) == 1 and len(first[0]) == 64 and rest == [None, None]
        private = replace(request("private", [9] * 40, max_tokens=1), no_cache=True)
        await collect(started, private)
        await settled(started, reader)
        assert set(reader.mirror.blocks) == seen, "blocks of requests that share nothing are not published"


@pytest.mark.slow
async def test_a_restart_clears_and_numbers_go_on():
    async with followed() as (started, events, reader):
        await collect(started, request("a", [1] * 100))
        await settled(started, reader)
        assert len(reader.mirror.blocks) >= 12
        os.kill(started.pid or 0, signal.SIGKILL)
        await until(lambda: started.state.status != "ok")
        await until(lambda: started.state.status == "ok")
        await settled(started, reader)
        assert not reader.mirror.blocks
        await collect(started, request("b", [2] * 50))
        await settled(started, reader)
        assert reader.mirror.prefixes() >= {(2,) * n for n in range(8, 49, 8)}
        assert (await started.stats()).event_batches == events.published


@pytest.mark.slow
async def test_changes_that_are_missing_bring_a_snapshot():
    async with followed() as (started, events, reader):
        await collect(started, request("a", [1] * 100))
        await settled(started, reader)
        before = dict(reader.mirror.blocks)
        events._expected += 1  # as if changes had been lost
        await collect(started, request("b", [2] * 50))
        await until(lambda: events._expected)
        await settled(started, reader)
        assert before.keys() < reader.mirror.blocks.keys()
        assert reader.mirror.prefixes() >= {(2,) * n for n in range(8, 49, 8)}


async def test_a_taken_port_is_an_error_at_the_start_and_leaves_nothing():
    with_port = KvEvents(HERE)
    with_port.open()
    taken = replace(HERE, endpoint=f"tcp://*:{with_port.endpoint.rpartition(':')[2]}")
    for begin in ("launch", "start"):
        refused = engine(KvEvents(taken))
        with pytest.raises(ConfigError, match="it is in use"):
            refused.launch() if begin == "launch" else await refused.start()
        assert refused.pid is None
    launched = engine(events := KvEvents(HERE))
    launched.launch()
    assert events.endpoint
    launched.abandon()
    assert not events.endpoint
    with_port.close()


@pytest.mark.slow
async def test_replicas_publish_with_their_ranks():
    """While the fleet follows the same changes; a replaced replica goes on with its numbers."""
    events = [KvEvents(HERE, rank) for rank in range(2)]
    fleet = FleetEngine(lambda i: engine(events[i], hands_over=True), 2)
    await fleet.start()
    readers = [Subscriber.of(one) for one in events]
    for i in range(6):
        await collect(fleet, request(f"r{i}", [i] * 60))
    for replica, reader in zip(fleet.replicas, readers, strict=True):
        await settled(replica.engine, reader)
        assert reader.mirror.rank == replica.index
        assert len(reader.mirror.blocks) == len(replica.map)
    assert sum(len(reader.mirror.blocks) for reader in readers) >= 6 * 7
    number = events[1].published
    await fleet.restart_replica(1)
    again = Subscriber.of(events[1])
    again.mirror = readers[1].mirror
    await settled(fleet.replicas[1].engine, again)
    assert again.mirror.number >= number and not again.mirror.blocks
    await until(lambda: fleet.replicas[1].map.block_size)
    for reader in (*readers, again):
        reader.close()
    await fleet.stop()
    assert not any(one.endpoint for one in events)


async def test_without_events_nothing_is_reported():
    fake = FakeRunner(**SMALL)
    core = EngineCore(fake, Scheduler(fake.capacity))
    assert core.cache_changes() is None and core.scheduler.kv.tree.log is None
    core.follow_cache()
    core.add(request("a", [1] * 40))
    runs = []
    while core.has_work():
        core.step()
        runs += changes.runs if (changes := core.cache_changes()) else ()
    assert runs and all(run.contents is None for run in runs), "a fleet needs hashes alone"
    assert not ProcessEngine.follows_contents
