"""KV cache events: vLLM's format, numbers without gaps, replay, bounds, and a publisher that never waits."""

from __future__ import annotations

import json
import random
from array import array
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from kvasir.engine.kv_event_format import batches
from kvasir.engine.kv_events import KvEvents, KvEventsConfig, at_rank, check_ranks, is_loopback, parse_kv_events
from kvasir.errors import ConfigError
from kvasir.kv.changes import HASH_BYTES, BlockRun, CacheChanges, CacheScope, RunContents
from tests.engine.kv_subscriber import AllBlocksCleared, BlockRemoved, BlockStored, Subscriber, decode
from tests.engine.vllm_events import vllm_events

HERE = KvEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:0", replay_endpoint="tcp://*:0")
SIZE = 4


def names(*numbers: int) -> bytes:
    return b"".join(n.to_bytes(HASH_BYTES, "big") for n in numbers)


def packed(*ids: int) -> bytes:
    return array("i", ids).tobytes()


def stored(number: int, blocks: int = 1) -> CacheChanges:
    """The changes of this number: blocks of a new sequence came."""
    contents = RunContents(packed(*[number] * SIZE * blocks), first=True)
    found = names(*(number * 1000 + i for i in range(blocks)))
    return CacheChanges(number, SIZE, (BlockRun(found, True, b"root", contents),))


def snapshot(number: int = 1) -> CacheChanges:
    return CacheChanges(number, SIZE, snapshot=True)


# All that events can say: adapters, a salt, inputs of the whole sequence, images, and what goes.
IMAGE, SCOPE = b"\xaa" * 32, CacheScope("french:0.5", "0:annsalt", b"\xbb" * 32)
RICH = CacheChanges(
    2,
    SIZE,
    (
        BlockRun(names(1, 2), True, b"r", RunContents(packed(*range(8)), SCOPE, ((5, IMAGE), (7, IMAGE)), True)),
        BlockRun(names(3), True, names(2), RunContents(packed(9, 9, 9, 9), SCOPE)),
        BlockRun(names(4), True, b"r", RunContents(packed(7, 7, 7, 7), first=True)),
        BlockRun(names(3, 2), False),
    ),
)
MARK, SALTED = IMAGE.hex(), ["annsalt", (b"\xbb" * 32).hex()]
RICH_EVENTS = [
    BlockStored(
        *([1, 2], None, list(range(8)), SIZE, None, "GPU", "french:0.5"),
        extra_keys=[["french:0.5", *SALTED], ["french:0.5", [MARK, 1], [MARK, 3]]],
    ),
    BlockStored([3], 2, [9, 9, 9, 9], SIZE, None, "GPU", "french:0.5", extra_keys=[["french:0.5"]]),
    BlockStored([4], None, [7, 7, 7, 7], SIZE, None, "GPU", None),
    BlockRemoved([3, 2], "GPU"),
]


@contextmanager
def published(config: KvEventsConfig = HERE, rank: int = 0, **subscriber):
    """An open publisher and its subscriber."""
    events = KvEvents(config, rank)
    events.open()
    events.serve()
    reader = Subscriber.of(events, **subscriber)
    try:
        yield events, reader
    finally:
        reader.close()
        events.close()


def payloads(events: KvEvents) -> list[bytes]:
    return [batch for _, batch in events._buffer]


def rich(rank: int = 3) -> list[bytes]:
    """The batches of a snapshot and of RICH."""
    events = KvEvents(HERE, rank)
    assert events.take(snapshot()) and events.take(RICH)
    return payloads(events)


async def arrived(events: KvEvents, reader: Subscriber) -> None:
    """Returns when the subscription has arrived, so that the reader gets what is published."""
    while not await reader.sub.poll(20):
        events.take(snapshot())


# -- the format --------------------------------------------------------------------------------------------------------


def test_the_format():
    first, second = map(decode, rich())
    assert first.events == [AllBlocksCleared()] and first.data_parallel_rank == 3
    assert second.events == RICH_EVENTS and second.ts >= first.ts > 1.7e9


def test_required_fields_are_there_if_they_are_null_and_optional_ones_are_not():
    _, events, rank = msgspec.msgpack.decode(rich()[1])
    required = {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"}
    assert rank == 3 and set(events[2]) == required | {"type"} and events[2]["type"] == "BlockStored"
    assert set(events[0]) == required | {"type", "extra_keys"}
    assert events[3] == {"type": "BlockRemoved", "block_hashes": [3, 2], "medium": "GPU"}


def test_vllms_own_classes_read_it():
    theirs = vllm_events()
    first, second = (msgspec.msgpack.decode(one, type=theirs.KVEventBatch) for one in rich())
    assert first.events == [theirs.AllBlocksCleared()] and second.data_parallel_rank == 3
    assert msgspec.json.encode(second.events) == msgspec.json.encode(RICH_EVENTS)
    assert all(hash(e) is not None for e in second.events[1:])
    for ours, read in zip(rich(), (first, second), strict=True):  # what they write of it has the same fields
        theirs_again = msgspec.msgpack.decode(msgspec.msgpack.encode(read))
        assert theirs_again[1:] == msgspec.msgpack.decode(ours)[1:]
    endpoints = ("tcp://*:5557", "tcp://*:0", "tcp://10.0.0.1:5557")
    offset = theirs.ZmqEventPublisher.offset_endpoint_port
    assert [at_rank(e, r) for e in endpoints for r in (0, 1, 7)] == [offset(e, r) for e in endpoints for r in (0, 1, 7)]
    assert theirs.ZmqEventPublisher.END_SEQ == b"\xff" * 8


def test_names_of_keys_are_not_published():
    salts = "3:ann", "3:annsalt", "3:bobsalt"
    runs = [
        BlockRun(names(1), True, b"r", RunContents(packed(*[1] * SIZE), CacheScope("", s), first=True)) for s in salts
    ]
    (events,) = batches(CacheChanges(2, SIZE, tuple(runs)))
    found = [msgspec.to_builtins(event)["extra_keys"][0][0] for event in events]
    assert len(set(found)) == 3 and all(len(one) == 64 for one in found)


def test_large_snapshots_come_in_several_batches():
    runs = tuple(run for i in range(1, 60) for run in stored(i, 1000).runs)
    found = list(batches(CacheChanges(1, SIZE, runs, True)))
    assert 3 < len(found) < 10 and sum(map(len, found)) == 60
    assert [type(e).__name__ for e in found[0][:2]] == ["AllBlocksCleared", "BlockStored"]


# -- numbers and replay ------------------------------------------------------------------------------------------------


async def test_who_joins_late_gets_what_was_published():
    with published() as (events, early):
        events.take(snapshot())
        for i in range(2, 40):
            events.take(stored(i))
        late = Subscriber.of(events)
        await late.catch_up()
        await early.catch_up()
        late.close()
        assert late.mirror.blocks == early.mirror.blocks and len(late.mirror.blocks) == 38
        assert await early.replay(35) == [(35 + i, batch) for i, batch in enumerate(payloads(events)[35:])]
        assert await early.replay(39) == [] == await early.replay(2**64 - 1)


async def test_messages_have_topic_number_and_batch():
    with published(replace(HERE, topic="kv@pod@model"), topic="kv@") as (events, reader):
        assert not events.take(stored(7)) and not events.published, "a snapshot comes first"
        await arrived(events, reader)
        events.take(stored(2))
        topic, number, payload = await reader.batch()
        assert (topic, payload) == (b"kv@pod@model", payloads(events)[number])
        while number < events.published - 1:
            number += 1
            assert await reader.batch() == (topic, number, payloads(events)[number])


async def test_missing_changes_clear_all_until_a_snapshot_comes():
    with published() as (events, reader):
        events.take(snapshot())
        assert events.take(stored(2)) and not events.take(stored(4)) and not events.take(stored(5))
        assert events.take(snapshot(6)) and events.take(stored(7))
        await reader.catch_up()
        assert set(reader.mirror.blocks) == {7000} and reader.mirror.number == 4
        events.clear()
        events.clear()
        await reader.catch_up()
        assert not reader.mirror.blocks and reader.mirror.number == 5


async def test_numbers_go_on_when_it_is_opened_again():
    events = KvEvents(HERE)
    events.take(snapshot())
    for turn in range(2):
        events.open()
        events.open()
        events.serve()
        events.take(stored(2 + turn))
        reader = Subscriber.of(events)
        await reader.catch_up()
        assert reader.mirror.number == 1 + turn and len(reader.mirror.blocks) == 1 + turn
        reader.close()
        events.close()
        events.close()


# -- bounds ------------------------------------------------------------------------------------------------------------


async def test_the_buffer_is_bounded(monkeypatch):
    with published(replace(HERE, buffer_steps=5)) as (events, reader):
        events.take(snapshot())
        for i in range(2, 100):
            events.take(stored(i))
        assert [number for number, _ in await reader.replay(0)] == [94, 95, 96, 97, 98]
        assert [number for number, _ in await reader.replay(97)] == [97, 98]
        monkeypatch.setattr("kvasir.engine.kv_events.BUFFER_BYTES", 3 * len(payloads(events)[0]) + 2)
        events.take(stored(100))
        assert [number for number, _ in await reader.replay(0)] == [97, 98, 99]
        assert events._buffered == sum(map(len, payloads(events)))


async def test_who_reads_too_slowly_misses_batches_and_holds_up_nobody():
    with published(replace(HERE, hwm=4), most=4) as (events, slow):
        fast = Subscriber.of(events)
        for reader in (slow, fast):
            await arrived(events, reader)
        first, number = events.published, 0
        while not events.dropped:
            number += 1
            events.take(stored(number + 1, blocks=20_000))
            got = -1
            while got != events.published - 1:  # the fast one gets each
                _, got, _ = await fast.batch()
            assert number < 2000, "nothing was dropped"
        assert events.published == first + number
        for i in range(3):
            events.take(stored(number + 2 + i))
        seen = []
        while await slow.sub.poll(50):
            seen.append((await slow.batch())[1])
        missed = next((a + 1 for a, b in pairwise(seen) if b != a + 1), seen[-1] + 1)
        again = await slow.replay(missed)
        assert again[0][0] == missed and again[-1][0] == events.published - 1
        fast.close()


async def test_hostile_requests_for_a_replay():
    with published() as (events, reader):
        events.take(snapshot())
        rng = random.Random(1)
        for _ in range(30):
            frames = [rng.randbytes(rng.choice((0, 1, 8, 9, 5000))) for _ in range(rng.randint(1, 5))]
            frames[0] = frames[0] or b"x"
            await reader.asks.send_multipart(frames)
        other = Subscriber.of(events)
        assert [number for number, _ in await other.replay(0)] == [0]
        other.close()


# -- options -----------------------------------------------------------------------------------------------------------


def test_vllms_config_is_read():
    text = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "t"}
    text |= {"replay_endpoint": "tcp://*:5657", "buffer_steps": 7, "hwm": 8, "max_queue_size": 9}
    found = parse_kv_events(json.dumps(text))
    assert found and found == KvEventsConfig(**text) and found.host == "127.0.0.1"
    assert parse_kv_events(json.dumps(text), "::1") == KvEventsConfig(**text, host="[::1]")
    for off in ({"enable_kv_cache_events": False}, {"enable_kv_cache_events": True, "publisher": "null"}):
        assert parse_kv_events(json.dumps({**text, **off})) is None
    assert parse_kv_events(None) is None


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("tcp://*:5557", "JSON"),
        ("[]", "object"),
        ('{"endpoint": "tcp://*:1"}', "does not say"),
        ('{"enable_kv_cache_events": 1}', "bool"),
        ('{"enable_kv_cache_events": true, "host": "0.0.0.0"}', "no field 'host'"),
        ('{"enable_kv_cache_events": true, "port": 1}', "no field 'port'"),
        ('{"enable_kv_cache_events": true, "publisher": "kafka"}', "kafka"),
        ('{"enable_kv_cache_events": true, "buffer_steps": 0}', "buffer_steps"),
        ('{"enable_kv_cache_events": true, "buffer_steps": 1e99}', "buffer_steps|float"),
        ('{"enable_kv_cache_events": true, "hwm": -1}', "hwm"),
        ('{"enable_kv_cache_events": true, "endpoint": "inproc://x"}', "inproc"),
        ('{"enable_kv_cache_events": true, "endpoint": "tcp://*"}', "endpoint"),
        ('{"enable_kv_cache_events": true, "endpoint": "tcp://*:70000"}', "endpoint"),
        ('{"enable_kv_cache_events": true, "replay_endpoint": "http://*:1"}', "endpoint"),
    ],
)
def test_wrong_configs_are_refused(text, wrong):
    with pytest.raises(ConfigError, match=wrong):
        parse_kv_events(text)


async def test_only_this_machine_is_served_unless_the_server_has_another_address():
    assert is_loopback(HERE) and is_loopback(replace(HERE, host="[::1]", endpoint="ipc:///x"))
    assert not is_loopback(replace(HERE, host="0.0.0.0"))
    assert not is_loopback(replace(HERE, replay_endpoint="tcp://10.0.0.1:5"))
    with published() as (events, _):
        assert events.endpoint.startswith("tcp://127.0.0.1:") and events.replay_endpoint.startswith("tcp://127.0.0.1:")


async def test_a_port_that_is_taken():
    with published() as (events, _):
        taken = events.endpoint.rpartition(":")[2]
        for other in (replace(HERE, endpoint=f"tcp://*:{taken}"), replace(HERE, replay_endpoint=f"tcp://*:{taken}")):
            refused = KvEvents(other)
            with pytest.raises(ConfigError, match=rf"127.0.0.1:{taken}: it is in use"):
                refused.open()
            assert not refused.endpoint
            refused.take(snapshot())
        with pytest.raises(ConfigError, match="cannot be published"):
            KvEvents(replace(HERE, host="203.0.113.1")).open()


def test_replicas_have_ports_of_their_own():
    assert at_rank("tcp://*:5557", 2) == "tcp://*:5559" and at_rank("ipc:///tmp/x", 2) == "ipc:///tmp/x_dp2"
    near = replace(HERE, endpoint="tcp://*:5557", replay_endpoint="tcp://*:5558")
    check_ranks(near, 1)
    check_ranks(replace(near, replay_endpoint="tcp://*:5559"), 2)
    check_ranks(HERE, 8)
    with pytest.raises(ConfigError, match="overlap"):
        check_ranks(near, 2)


async def test_it_connects_to_a_host_that_is_named():
    with published() as (events, reader):  # binds a port for the reader's own socket below
        port = reader.sub.bind_to_random_port("tcp://127.0.0.1")
        outward = KvEvents(replace(HERE, endpoint=f"tcp://127.0.0.1:{port}", topic="out"))
        outward.open()
        while not await reader.sub.poll(20):
            outward.take(snapshot())
        assert (await reader.batch())[0] == b"out" and not events.published
        outward.close()
