"""HostTier: what it gives is right, what it keeps is bounded, what falls goes below, and nothing is left at the end."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.kv.tiers.connector import Failed
from kvasir.kv.tiers.disk import DiskTier
from kvasir.kv.tiers.host import HostTier
from kvasir.kv.tiers.joint import JointTier
from tests.kv._tiers import FACTS, blocks_of, load, payload_of, read_at, until

SIZES = [group.num_bytes for group in FACTS.groups]
BLOCKS = blocks_of(12)


def save(tier: HostTier, block, group: int = 0) -> bool:
    return tier.save(block, group, payload_of(block, group))


@given(st.lists(st.tuples(st.sampled_from(["save", "load"]), st.integers(0, 11), st.integers(0, 1)), max_size=80),
       st.integers(40, 600))  # fmt: skip
def test_the_host_tier_is_a_bounded_lru_map(operations, max_bytes):
    tier, expected = HostTier(FACTS, max_bytes), OrderedDict()
    for operation, i, group in operations:
        name = (BLOCKS[i].key, group)
        if operation == "load":
            assert load(tier, BLOCKS[i], group) == expected.get(name, "missing")
            if name in expected:
                expected.move_to_end(name)
        elif save(tier, BLOCKS[i], group):
            assert name not in expected
            while sum(map(len, expected.values())) + SIZES[group] > max_bytes:
                expected.popitem(last=False)
            expected[name] = payload_of(BLOCKS[i], group)
        else:
            assert name in expected or SIZES[group] > max_bytes
        stats = tier.stats()
        assert stats.num_bytes == sum(map(len, expected.values())) <= max_bytes
        assert stats.num_parts == len(expected) and stats.open_loads == stats.open_bytes == 0
        for group in (0, 1):
            assert [tier.has((b.key,), group) > 0 for b in BLOCKS] == [(b.key, group) in expected for b in BLOCKS]


def test_of_a_chain_the_leading_blocks_count():
    tier = HostTier(FACTS, 1000)
    for i in (0, 1, 3):
        save(tier, BLOCKS[i])
    assert tier.has([b.key for b in BLOCKS]) == 2 and tier.ask([b.key for b in BLOCKS])
    assert tier.has([b.key for b in BLOCKS], 1) == 0


def test_fetched_bytes_stay_valid_after_eviction():
    tier = HostTier(FACTS, 200)
    save(tier, BLOCKS[0])
    ticket, other = tier.start_load(BLOCKS[0]), tier.start_load(BLOCKS[0])
    assert tier.stats().open_loads == 2 and tier.stats().open_bytes == 2 * 96
    for block in BLOCKS[1:4]:
        save(tier, block)
    assert not tier.has((BLOCKS[0].key,))
    assert tier.poll(ticket) == payload_of(BLOCKS[0])
    tier.cancel(other)
    tier.cancel(other)
    assert tier.stats().open_loads == 0 and tier.stats().loads == {"loaded": 1}


def test_fetched_bytes_are_read_only():
    tier = HostTier(FACTS, 200)
    tier.save(BLOCKS[0], 0, bytearray(96))
    found = tier.poll(tier.start_load(BLOCKS[0]))
    assert isinstance(found, memoryview) and found.readonly


def test_another_block_under_a_name_is_not_given():
    tier = HostTier(FACTS, 1000)
    save(tier, BLOCKS[0])
    liar = replace(BLOCKS[1])
    object.__setattr__(liar, "key", BLOCKS[0].key)
    found = tier.poll(tier.start_load(liar))
    assert found == Failed("foreign") and tier.stats().loads == {"foreign": 1}


@pytest.fixture
def disk(tmp_path):
    tier = DiskTier(tmp_path / "kv", FACTS, 1 << 20)
    assert tier.wait_scanned(30)
    yield tier
    tier.close(30)


def test_evicted_parts_are_found_in_the_tier_below(disk):
    host = HostTier(FACTS, 2 * 96, disk)
    both = JointTier([host, disk])
    for block in BLOCKS:
        assert both.wants(block.key, 0) and save(host, block)
    until(lambda: both.stats().queued_bytes == 0)
    assert both.has([b.key for b in BLOCKS]) == len(BLOCKS)
    assert [load(both, b) for b in BLOCKS] == [payload_of(b) for b in BLOCKS]
    each = both.each()
    assert list(each) == ["host", "disk"]
    assert each["host"].loads == {"loaded": 2} and each["disk"].loads == {"loaded": 10}
    assert each["host"].evicted == 10 == each["disk"].saves["saved"]
    total = both.stats()
    assert total.loads == {"loaded": 12}
    for name in ("num_bytes", "num_parts", "bytes_loaded", "bytes_saved", "evicted"):
        assert getattr(total, name) == sum(getattr(s, name) for s in each.values()), name


def test_only_what_lies_on_disk_takes_time_to_read(disk, monkeypatch):
    host = HostTier(FACTS, 1000, disk)
    both = JointTier([host, disk])
    disk.save(BLOCKS[0], 0, payload_of(BLOCKS[0]))
    save(host, BLOCKS[1])
    until(lambda: disk.stats().queued_bytes == 0)
    read_at(monkeypatch, 48.0)
    assert both.read_seconds([(BLOCKS[1].key, 0)]) == 0.0
    assert both.read_seconds([(b.key, 0) for b in BLOCKS[:2]]) == pytest.approx(2.0)


def test_parts_that_are_computed_faster_are_not_written_below(disk, monkeypatch):
    host = HostTier(FACTS, 96, disk)
    read_at(monkeypatch, 96.0)
    for pace, block in zip((1.0, 1.0, 1000.0, 1000.0), BLOCKS, strict=False):
        assert host.wants(block.key, 0, pace), "the host's memory is read at once"
        save(host, block)
    assert disk.stats().saves.get("slow") == 2


def test_ending_moves_all_parts_below_and_later_ones_directly(disk, tmp_path):
    host = HostTier(FACTS, 96 * 6, disk)
    both = JointTier([host, disk])
    for block in BLOCKS[:6]:
        save(host, block)
    both.ending()
    for block in BLOCKS[6:]:
        assert both.wants(block.key, 0) and both.save(block, 0, payload_of(block))
    assert host.stats().num_parts == 6
    both.close(30.0)
    assert disk.stats().saves == {"saved": 12} and host.stats().num_bytes == 0
    again = DiskTier(tmp_path / "kv", FACTS, 1 << 20)
    assert again.wait_scanned(30)
    assert [load(again, b) for b in BLOCKS] == [payload_of(b) for b in BLOCKS]
    again.close()


def test_closing_without_time_waits_for_nothing(disk):
    host = HostTier(FACTS, 1000, disk)
    save(host, BLOCKS[0])
    host.close(0.0)
    assert host.stats().num_parts == 0 == host.stats().num_bytes
