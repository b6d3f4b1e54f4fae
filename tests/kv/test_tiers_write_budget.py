"""What is worth writing: a bounded share of the time goes into it, and none into what is computed faster than read."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.kv.tiers import disk, transfers
from kvasir.kv.tiers.block import StoredBlock
from kvasir.kv.tiers.disk import DiskTier
from kvasir.kv.tiers.write_budget import FACTOR, FIRST, MOST, OWED, WriteBudget
from tests.kv._tiers import blocks_of, facts_of, load, payload_of, read_at, until

FACTS = facts_of(1000)
SECONDS = st.floats(0.0, 0.06)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS), max_size=200), st.floats(0.001, 1.0))
def test_never_more_is_spent_than_was_earned(offers, share):
    """Parts are offered one after the other: computing each took so long, writing it would, reading another saved."""
    write_budget = WriteBudget(share)
    earned, spent, dearest = FIRST, 0.0, 0.0
    for computing, writing, saving in offers:
        write_budget.computed(computing)
        write_budget.saved(saving)
        earned += share * computing + saving
        if write_budget.affords(0):
            write_budget.spend(write_budget.take(1000), 1000, writing)
            spent += FACTOR * writing
            dearest = max(dearest, FACTOR * writing)
    assert spent <= earned + dearest + 1e-9


@given(st.lists(SECONDS, min_size=20, max_size=50))
def test_parts_that_are_cheap_enough_are_all_written(computing):
    write_budget = WriteBudget(0.5)
    for seconds in computing:
        write_budget.computed(seconds)
        assert write_budget.affords(0)
        write_budget.spend(write_budget.take(1000), 1000, 0.5 * seconds / FACTOR)


def test_saved_budget_is_bounded_and_unused_budget_is_returned():
    write_budget = WriteBudget(0.5)
    write_budget.computed(1000.0)
    write_budget.saved(1000.0)
    write_budget.spend(write_budget.take(10**6), 0, 0.0)
    write_budget.spend(write_budget.take(10**6), 10**6, MOST / FACTOR)
    assert not write_budget.affords(0), "all that was put by is spent"


def test_a_limited_budget_goes_to_the_beginnings_of_prefixes():
    """A third of all blocks; sequences of twelve lose the last first."""
    write_budget, written, usable = WriteBudget(0.5), 0, 0
    for _ in range(300):
        found = set()
        for depth in reversed(range(12)):
            write_budget.computed(0.02)
            if write_budget.affords(depth):
                write_budget.spend(write_budget.take(1000), 1000, 0.03 / FACTOR)
                found.add(depth)
        written += len(found)
        usable += next(i for i in itertools.count() if i not in found)
    assert abs(written / 3600 - 1 / 3) < 0.03
    assert usable > 0.9 * written


def test_a_slow_write_makes_later_ones_dear_but_leaves_little_debt():
    budget = WriteBudget(0.5)
    assert budget.take(1000) < 1.0
    budget.spend(0.0, 1000, 100.0)
    assert not budget.affords(0)
    budget.computed(2.1 * OWED)
    assert budget.affords(0)
    assert budget.take(1000) == pytest.approx(FACTOR * 100.0)


@given(st.lists(SECONDS, max_size=20))
def test_without_a_share_all_is_written(writing):
    write_budget = WriteBudget(None)
    for seconds in writing:
        write_budget.spend(write_budget.take(1000), 1000, 1000 * seconds)
        assert write_budget.affords(0)


@contextmanager
def opened(folder: Path, share: float | None) -> Iterator[DiskTier]:
    tier = DiskTier(folder / "kv", FACTS, 1 << 20, share=share)
    try:
        assert tier.wait_scanned(30)
        yield tier
    finally:
        tier.close(30.0)


def offer(tier: DiskTier, blocks: list[StoredBlock], pace: float) -> int:
    """One after the other; returns how many were written."""
    wanted, before = 0, tier.stats().saves.get("saved", 0)
    for block in blocks:
        if tier.wants(block.key, 0, pace):
            wanted += 1
            assert tier.save(block, 0, payload_of(block, facts=FACTS))
            until(lambda: tier.stats().queued_bytes == 0)
    assert tier.stats().saves.get("saved", 0) - before == wanted
    return wanted


@pytest.fixture
def writes_take_2_ms(monkeypatch):
    """By the writer's clock."""
    ticks, clock = itertools.count(0.0, 0.002), time.perf_counter
    writer = "kv-disk-save"
    slow = lambda: next(ticks) if threading.current_thread().name == writer else clock()  # noqa: E731
    monkeypatch.setattr(disk.time, "perf_counter", slow)


def test_a_writer_takes_its_share_and_no_more(tmp_path, writes_take_2_ms):
    """Computing a block takes 10 ms, of which writing may take 1; it takes 3: a third is written, and the sample."""
    with opened(tmp_path, 0.1) as tier:
        wanted = offer(tier, blocks_of(150), pace=1000 / 0.010)
        assert abs(wanted - (150 / 3 + FIRST / 0.003)) <= 2
        assert tier.stats().saves["dear"] == 150 - wanted


def test_parts_that_take_long_to_compute_are_all_written(tmp_path, writes_take_2_ms):
    with opened(tmp_path, 0.1) as tier:
        assert offer(tier, blocks_of(60), pace=1000 / 0.031) == 60


def test_without_rates_a_sample_is_written(tmp_path, writes_take_2_ms):
    with opened(tmp_path, 0.1) as tier:
        assert abs(offer(tier, blocks_of(60), pace=0.0) - FIRST / 0.003) <= 1


def test_reads_earn_a_write_budget(tmp_path, writes_take_2_ms):
    """Computing a block takes 100 ms, nothing of which is for writing."""
    with opened(tmp_path, 0.0) as tier:
        blocks = blocks_of(300)
        before = offer(tier, blocks[:100], pace=1000 / 0.1)
        assert abs(before - FIRST / 0.003) <= 1
        for block in blocks[:5]:
            assert load(tier, block) == payload_of(block, facts=FACTS)
        assert offer(tier, blocks[100:], pace=1000 / 0.1) > 100


def test_writing_at_the_end_of_an_engine_is_not_limited(tmp_path, writes_take_2_ms):
    with opened(tmp_path, 0.0) as tier:
        tier.ending()
        assert offer(tier, blocks_of(100), pace=1000 / 0.01) == 100


@pytest.mark.parametrize("ending", [False, True])
def test_parts_that_are_computed_faster_than_read_are_not_written(tmp_path, ending, monkeypatch):
    read_at(monkeypatch, 1000.0)
    with opened(tmp_path, None) as tier:
        if ending:
            tier.ending()
        block = blocks_of(1)[0]
        assert not tier.wants(block.key, 0, pace=1001.0) and tier.stats().saves == {"slow": 1}
        assert tier.wants(block.key, 0, pace=999.0)
        assert tier.wants(block.key, 0), "how fast computing is nobody knows"


def test_the_write_rate_is_measured_and_updated(tmp_path, monkeypatch):
    with opened(tmp_path, None) as tier:
        blocks = blocks_of(3)
        offer(tier, blocks[:1], pace=1e15)
        first = tier.stats()
        assert 0 < first.read_rate < 1e15 and first.loads == {}
        assert not tier.wants(blocks[1].key, 0, pace=1e15)
        now = time.monotonic()
        monkeypatch.setattr(transfers.time, "monotonic", lambda: now + transfers.RATE_SECONDS + 1)
        assert tier.stats().read_rate == 0.0
        offer(tier, blocks[1:2], pace=1e15)
        assert tier.stats().read_rate > 0.0
        assert not tier.wants(blocks[2].key, 0, pace=1e15)
