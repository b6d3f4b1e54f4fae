"""The map of a replica's prefix cache: what it predicts is what the replica finds."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.engine.fake import FakeEngine
from kvasir.engine.host import EngineHost
from kvasir.engine.remote import HostAddress, RemoteEngine
from kvasir.fleet.engine import FleetEngine
from kvasir.fleet.prefix_map import PrefixMap, keys_of
from kvasir.fleet.replica import Routed
from kvasir.inputs import Adapter
from kvasir.kv.changes import HASH_BYTES, BlockRun, CacheChanges, chain
from tests.engine.test_adapters import written
from tests.engine.test_process import collect, until
from tests.fleet.fleets import all_ready, kill, running
from tests.sched.drive import request
from tests.sched.inputs import random_inputs, sources_of


def names(*numbers: int) -> bytes:
    return b"".join(n.to_bytes(HASH_BYTES, "little") for n in numbers)


def changes(number: int, *runs: BlockRun, snapshot: bool = False) -> CacheChanges:
    return CacheChanges(number, 8, runs, snapshot)


def test_a_gap_makes_it_forget_until_a_snapshot_comes():
    map, key = PrefixMap(), [names(1), names(2)]
    assert not map.take(changes(1, BlockRun(names(1)))), "it begins with a snapshot"
    assert map.take(changes(5, BlockRun(names(1, 2)), snapshot=True)) and map.cached(key) == 2
    assert map.take(changes(6, BlockRun(names(2), False))) and map.cached(key) == 1
    assert not map.take(changes(8, BlockRun(names(2)))) and map.cached(key) == 0 and map.gaps == 1
    assert not map.take(changes(9, BlockRun(names(2)))) and map.gaps == 1 and map.block_size == 0
    assert map.take(changes(12, BlockRun(names(1)), snapshot=True)) and map.cached(key) == 1


def test_it_is_bounded():
    map = PrefixMap(most=10)
    assert map.take(changes(1, BlockRun(names(*range(1, 9))), snapshot=True))
    assert map.take(changes(2, BlockRun(names(*range(9, 20)))))
    assert len(map) == 10 and map.dropped == 9
    assert map.cached([names(i) for i in range(1, 20)]) == 10


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 20), min_size=1, max_size=5)), max_size=20), st.data())
def test_it_is_the_set_that_the_changes_describe(events, data):
    map, plain = PrefixMap(), set()
    assert map.take(changes(1, snapshot=True))
    for number, (stored, some) in enumerate(events):
        plain = plain | set(some) if stored else plain - set(some)
        assert map.take(changes(2 + number, BlockRun(names(*some), stored)))
    keys = data.draw(st.lists(st.integers(0, 20), max_size=8))
    first = next((i for i, key in enumerate(keys) if key not in plain), len(keys))
    assert len(map) == len(plain) and map.cached([names(key) for key in keys]) == first


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=6))
def test_promises_leave_nothing(promised):
    map = PrefixMap()
    lists = [[names(key) for key in some] for some in promised]
    for some in lists:
        map.promise(some)
        assert map.cached(some) == len(some)
    for some in lists:
        map.promise(some, -1)
    assert all(map.cached(some) == 0 for some in lists if some) and not map._promised


@given(st.lists(st.integers(0, 5), max_size=60), st.lists(st.integers(0, 5), max_size=60), st.integers(1, 9))
def test_sequences_share_names_as_far_as_they_are_equal(a, b, size):
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    x, y = list(chain(b"", a, {}, size)), list(chain(b"", b, {}, size))
    shared = next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y)))
    assert shared == same // size
    assert not set(x) & set(chain(b"other", a, {}, size))


def test_names_depend_on_salts_adapters_and_contents():
    ids, content = tuple(range(100)), random_inputs(random.Random(1), 100)
    plain = request("a", list(ids))
    variants = [
        plain,
        replace(plain, cache_salt="x"),
        replace(plain, adapters=(Adapter("n", content="c1"),)),
        replace(plain, adapters=(Adapter("n", content="c2"),)),
        replace(plain, adapters=(Adapter("n", 0.5, content="c1"),)),
    ]
    firsts = [keys_of(one, ids, 8)[0] for one in variants]
    assert len(set(firsts)) == len(firsts)
    late = replace(plain, adapters=(Adapter("n", start=40, content="c1"),))
    found, usual = keys_of(late, ids, 8), keys_of(plain, ids, 8)
    assert found[:5] == usual[:5] and not set(found[5:]) & set(usual[5:])
    assert keys_of(replace(plain, inputs=content), ids, 8) != usual
    assert keys_of(replace(plain, no_cache=True), ids, 8) == []
    assert len(usual) == 12, "one id at least is left to compute"


# -- engines -----------------------------------------------------------------------------------------------------------

FAKE: dict[str, Any] = {
    "vocab_size": 256,
    "num_blocks": 120,
    "max_rows": 8,
    "max_model_len": 512,
    "block_size": 8,
    "max_loras": 4,
}


async def test_what_is_predicted_is_found(tmp_path):
    """Over all that keys depend on, with evictions: what the cache has beyond whole blocks is never predicted."""
    engine = FleetEngine(lambda i: FakeEngine(**FAKE), 2)
    await engine.start()
    rng = random.Random(5)
    for name in ("x", "y"):
        await engine.load_adapter(name, written(tmp_path, name))
    await until(lambda: all(r.map.block_size for r in engine.replicas))
    texts = [([rng.randrange(250) for _ in range(80)], random_inputs(rng, 80)) for _ in range(4)]
    seen, predicted, of_contents = dict.fromkeys(range(2), 0), 0, 0
    for i in range(120):
        text, content = rng.choice(texts)
        with_content = rng.random() < 0.4
        ids = text[: 80 if with_content else rng.randint(10, 80)] + [
            rng.randrange(250) for _ in range(rng.randint(0, 30))
        ]
        asked = request(f"r{i}", ids, max_tokens=rng.randint(1, 20))
        adapters = tuple(Adapter(n, rng.choice((1.0, 0.5))) for n in rng.choice(((), (), (), ("x",), ("y",))))
        asked = replace(asked, adapters=adapters, cache_salt=rng.choice((None, None, "salt")))
        if with_content:
            asked = replace(asked, inputs=replace(content, positions=b"", axes=1), sources=sources_of(content))
        deltas = engine.submit(asked)
        hit = (await anext(deltas)).cached_tokens
        (replica,) = (r for r in engine.replicas if r.open or r.counts.predicted != seen[r.index])
        expected = replica.counts.predicted - seen[replica.index]
        assert expected <= hit < expected + FAKE["block_size"], asked
        seen[replica.index] += expected
        predicted, of_contents = predicted + expected, of_contents + expected * with_content
        async for _ in deltas:
            pass
    assert predicted > 1000 and of_contents > 200, (predicted, of_contents)
    await engine.check()
    assert not any(r.map._promised for r in engine.replicas)
    await engine.stop()


async def test_what_a_continued_stream_finds_of_its_answer_is_no_hit_and_not_predicted():
    async with running(1, block_size=8) as engine:
        (replica,) = engine.replicas
        asked = request("a", [7] * 20, max_tokens=60)
        (ids,) = (await collect(engine, asked)).values()
        whole = Routed.of(replace(asked, prompt_ids=(*asked.prompt_ids, *ids)), 0.0)
        await until(lambda: replica.predicted(whole) >= 72)
        await collect(engine, replace(asked, id="b", resume_ids=(tuple(ids[:56]),), resume_carries=(b"",)))
        assert replica.counts.predicted == replica.counts.hit == 20


async def test_requests_go_where_their_prefix_is():
    async with running(3, policy="prefix", block_size=8) as engine:
        await until(lambda: all(r.map.block_size for r in engine.replicas))
        talks = [[i] * 100 for i in range(6)]
        homes = []
        for turn in range(3):
            for i, talk in enumerate(talks):
                stream = engine.submit(request(f"{turn}-{i}", [*talk, *range(turn)], max_tokens=3))
                await anext(stream)
                (home,) = (r.index for r in engine.replicas if r.open)
                homes.append(home)
                async for _ in stream:
                    pass
        assert homes[:6] == homes[6:12] == homes[12:] and len(set(homes)) == 3
        stats = (await engine.stats()).replicas.values()
        assert sum(r.predicted_tokens for r in stats) >= 12 * 96
        assert sum(r.hit_tokens for r in stats) >= sum(r.predicted_tokens for r in stats)


@pytest.mark.slow
async def test_a_dead_replicas_cache_is_forgotten_and_a_new_one_is_followed():
    async with running(2, policy="round-robin", block_size=8) as engine:
        await until(lambda: all(r.map.block_size for r in engine.replicas))
        await collect(engine, request("a", [1] * 100))
        await until(lambda: any(len(r.map) for r in engine.replicas))
        (home,) = (r for r in engine.replicas if len(r.map))
        kill(home)
        await until(lambda: not home.takes)
        await all_ready(engine)
        await until(lambda: home.map.block_size)
        home.map._number += 1  # as if changes had been lost
        for i in range(6):
            await collect(engine, request(f"b{i}", [i] * 100))
        await until(lambda: home.map.gaps == 1 and len(home.map))


async def test_engines_behind_sockets_are_followed(tmp_path):
    """By two fleets at once, and again after a connection broke."""
    engines = [FakeEngine(**FAKE) for _ in range(2)]
    hosts = [EngineHost(engine) for engine in engines]
    for i, (engine, host) in enumerate(zip(engines, hosts, strict=True)):
        await engine.start()
        await host.listen_unix(tmp_path / f"{i}.sock")
    fleets = [
        FleetEngine(lambda i: RemoteEngine(HostAddress(tmp_path / f"{i}.sock")), 2, policy="prefix") for _ in range(2)
    ]
    for one in fleets:
        await one.start()
    await until(lambda: all(r.map.block_size for one in fleets for r in one.replicas))
    for i in range(4):
        await collect(fleets[i % 2], request(f"a{i}", [i] * 60, max_tokens=2))
    await until(lambda: all(sum(len(r.map) for r in one.replicas) == 4 * 7 for one in fleets))
    for i in range(4):
        await collect(fleets[0], request(f"b{i}", [i] * 60, max_tokens=2))
    assert sum(r.counts.predicted for r in fleets[0].replicas) == 4 * 56
    remote = fleets[1].replicas[0].engine
    assert isinstance(remote, RemoteEngine) and remote._link is not None
    remote._link.abort()
    await until(lambda: len(fleets[1].replicas[0].map) == 0)
    await until(lambda: len(fleets[1].replicas[0].map) == len(fleets[0].replicas[0].map))
    for part in (*fleets, *hosts, *engines):
        await (part.close() if isinstance(part, EngineHost) else part.stop())
