"""Totals over an engine's processes: sums of the last statistics of each, which never decrease."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from kvasir.engine.cumulative_stats import CumulativeStats, ended, total
from kvasir.engine.subprocess import ProcessEngine
from kvasir.metrics import Histogram, is_gauge
from kvasir.statistics import ClassStats, EngineStats, TierStats
from kvasir.types import ServiceClass
from tests.engine.test_process import FAKE, collect, until
from tests.sched.drive import request

COUNT = st.integers(0, 1000)


NUMBERS = [f.name for f in fields(EngineStats) if isinstance(getattr(EngineStats(), f.name), int | float)]
GAUGES = {f.name for f in fields(EngineStats) if is_gauge(f)}


def stats(numbers: dict[str, int], words: dict[str, int], classes: dict[ServiceClass, int]) -> EngineStats:
    of_classes = {c: ClassStats(n, n, n, Histogram(counts=[n] * 16, sum=float(n))) for c, n in classes.items()}
    tiers = {name: TierStats(words, words, n, n, n, float(n), num_bytes=n) for name, n in words.items()}
    return EngineStats(**numbers, tier_loads=words, tier_saves=words, classes=of_classes, tiers=tiers)


STATS = st.builds(
    stats,
    st.fixed_dictionaries({name: COUNT for name in NUMBERS}),
    st.dictionaries(st.sampled_from("abc"), COUNT),
    st.dictionaries(st.sampled_from(list(ServiceClass)), COUNT),
)


@given(st.lists(st.lists(STATS, max_size=3), max_size=4), STATS)
def test_totals_are_the_sums_of_the_last_statistics_of_each_process(dead, now):
    lives = CumulativeStats()
    for life in dead:
        for reported in life:
            lives.add(reported)
        lives.end()
    found, last = lives.add(now), [life[-1] for life in dead if life]
    for name in NUMBERS:
        wanted = getattr(now, name) + (0 if name in GAUGES else sum(getattr(reported, name) for reported in last))
        assert getattr(found, name) == wanted, name
    for word in "abc":
        assert found.tier_loads.get(word, 0) == sum(reported.tier_loads.get(word, 0) for reported in (*last, now))
        one, all_of = found.tiers.get(word, TierStats()), [t.tiers[word] for t in (*last, now) if word in t.tiers]
        assert one.bytes_saved == sum(t.bytes_saved for t in all_of)
        assert one.loads.get(word, 0) == sum(t.loads[word] for t in all_of)
        assert one.num_bytes == now.tiers.get(word, TierStats()).num_bytes
    for c in ServiceClass:
        own, all_of = now.classes.get(c, ClassStats()), [t.classes[c] for t in (*last, now) if c in t.classes]
        one = found.classes.get(c, ClassStats())
        assert (one.running, one.waiting) == (own.running, own.waiting), "what is dead neither runs nor waits"
        assert one.displaced == sum(k.displaced for k in all_of)
        assert one.queue_seconds.cumulative()[-1][1] == sum(k.queue_seconds.cumulative()[-1][1] for k in all_of)


@given(STATS)
def test_totals_of_one_engine_process_are_its_own(reported):
    assert total(EngineStats(), reported) == reported == CumulativeStats().add(reported)


async def test_the_totals_of_an_engine_do_not_fall_when_it_dies():
    engine = ProcessEngine(fake=FAKE)
    await engine.start()
    await collect(engine, request("a", [1, 2], max_tokens=30))
    first, before = await engine.stats(), (await engine.look()).stats  # the last statistics: one more step may end
    assert first.generated_tokens == before.generated_tokens == 30
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: engine.restarts == 1)
    after = await engine.stats()
    assert (after.generated_tokens, after.steps, after.finished) == (30, before.steps, before.finished)
    assert after.pid != before.pid and after.blocks_used == 0
    await asyncio.wait_for(collect(engine, request("b", [1, 2], max_tokens=20)), 30)
    assert (await engine.stats()).generated_tokens == (await engine.look()).stats.generated_tokens == 50
    await engine.stop()


def test_gauges_by_name_are_empty_once_their_engine_is_away():
    away = ended(EngineStats(adapters_running={"x": 1}, adapters_loads=2, waiting=3))
    assert (away.adapters_running, away.adapters_loads, away.waiting) == ({}, 2, 0)
    here = EngineStats(adapters_running={"x": 1, "y": 2}, adapters_loads=5)
    for both in (total(away, here, gauges=True), total(here, away, gauges=True)):
        assert (both.adapters_running, both.adapters_loads) == ({"x": 1, "y": 2}, 7)
    assert total(here, here, gauges=True).adapters_running == {"x": 2, "y": 4}
