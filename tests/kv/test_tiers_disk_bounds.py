"""DiskTier: its size is bounded, it survives all failures, and it never waits."""

import errno
import os
import subprocess
import threading
import time

import pytest

from kvasir.kv.tiers import disk
from kvasir.kv.tiers.disk import DiskTier
from tests.kv._disk import ROOM, fill, opened, parts, path_of, room_for, save, saved, size_of
from tests.kv._tiers import FACTS, blocks_of, facts_of, load, payload_of, until

# -- the bound -------------------------------------------------------------------------------------------------


def test_the_bound_is_kept_while_writing(folder, monkeypatch):
    facts = facts_of(50_000)
    bound = room_for(6, facts) + 100
    sizes, real = [], os.rename

    def rename(source, target):  # the fullest moment of each write, seen by the only thread that changes the folder
        sizes.append(size_of(folder))
        real(source, target)

    monkeypatch.setattr(disk.os, "rename", rename)
    with opened(folder, facts, bound) as tier:
        for block in blocks_of(60):
            save(tier, block)
        until(lambda: saved(tier) == 60)
        stats = tier.stats()
        assert stats.evicted == 54 and stats.num_parts == 6 and stats.num_bytes == size_of(folder)
    assert len(sizes) == 60 and bound - 200 < max(sizes) <= bound


def test_the_longest_unused_goes_first(folder, monkeypatch):
    monkeypatch.setattr(disk, "SCAN_SHARE", 0)  # the order is that of our own uses: no listing brings it
    facts = facts_of(50_000)
    bound = room_for(4, facts)
    blocks = blocks_of(6)
    with opened(folder, facts, bound) as tier:
        for i, block in enumerate(blocks[:4]):
            save(tier, block)
            until(lambda n=i + 1: saved(tier) == n)
        assert load(tier, blocks[0]) == payload_of(blocks[0], 0, facts)
        save(tier, blocks[4])
        until(lambda: saved(tier) == 5)
        assert [tier.has([b.key]) for b in blocks] == [1, 0, 1, 1, 1, 0]


def test_the_order_of_use_survives_a_restart_and_so_does_the_bound(folder):
    facts = facts_of(50_000)
    blocks = blocks_of(4)
    fill(folder, blocks, facts)
    for age, block in enumerate(blocks):
        os.utime(path_of(folder, block), (1e9 - age, 1e9 - age))
    with opened(folder, facts) as tier:
        load(tier, blocks[3])
    with opened(folder, facts, room_for(2, facts)) as tier:
        assert [tier.has([b.key]) for b in blocks] == [1, 0, 0, 1]
        assert len(parts(folder)) == 2


def test_a_part_larger_than_the_tier_is_not_kept(folder):
    facts = facts_of(50_000)
    (block,) = blocks_of(1)
    with opened(folder, facts, 50_000) as tier:
        assert not tier.save(block, 0, payload_of(block, 0, facts))
        assert tier.stats().saves == {"large": 1} and not parts(folder)


def test_two_engines_keep_the_bound_together(folder):
    facts = facts_of(20_000)
    bound = room_for(32, facts)
    with opened(folder, facts, bound) as one, opened(folder, facts, bound) as two:
        for mine, yours in zip(blocks_of(150, b"a"), blocks_of(150, b"b"), strict=True):
            save(one, mine)
            save(two, yours)
        until(lambda: not one.stats().queued_bytes and not two.stats().queued_bytes)
        assert size_of(folder) <= bound * (1 + 4 / disk.SCAN_SHARE)


def test_another_engines_parts_are_found(folder, monkeypatch):
    monkeypatch.setattr(disk, "SCAN_SECONDS", 0.02)
    (block,) = blocks_of(1)
    with opened(folder) as one, opened(folder) as two:
        save(one, block)
        until(lambda: two.has([block.key]))
        assert load(two, block) == payload_of(block)


# -- writes that fail, queues that are full ---------------------------------------------------------------------


@pytest.mark.parametrize("written", [0, 7])
def test_a_full_disk_is_counted_and_not_written_for_a_while(folder, monkeypatch, written):
    blocks = blocks_of(4)
    real, calls = os.write, []

    def full(fd, data):
        calls.append(fd)
        if written and len(calls) == 1:
            return real(fd, bytes(data[:written]))
        raise OSError(errno.ENOSPC, "no space left")

    with opened(folder) as tier:
        monkeypatch.setattr(disk.os, "write", full)
        save(tier, blocks[0])
        until(lambda: tier.stats().saves.get("error"))
        assert not tier.save(blocks[1], 0, payload_of(blocks[1]))
        assert tier.stats().saves == {"error": 1, "paused": 1}
        assert not list(folder.glob("tmp-*")) and not parts(folder) and tier.has([blocks[0].key]) == 0
        monkeypatch.setattr(disk.os, "write", real)
        now = time.monotonic
        monkeypatch.setattr(disk.time, "monotonic", lambda: now() + disk.PAUSE_SECONDS)
        save(tier, blocks[0])
        until(lambda: saved(tier))
        assert load(tier, blocks[0]) == payload_of(blocks[0])


@pytest.mark.parametrize("call", ["rename", "open"])
def test_no_error_of_the_disk_reaches_the_engine(folder, monkeypatch, call):
    (block,) = blocks_of(1)

    def fails(*_, **__):
        raise PermissionError(errno.EACCES, "no")

    with opened(folder) as tier:
        monkeypatch.setattr(disk.os, call, fails)
        save(tier, block)
        until(lambda: tier.stats().saves.get("error"))
        monkeypatch.undo()
        assert not list(folder.glob("tmp-*")) and load(tier, block) == "missing"


def test_a_deleted_folder_causes_misses_only(folder):
    one, two = blocks_of(2)
    fill(folder, [one])
    with opened(folder) as tier:
        subprocess.run(["rm", "-r", folder], check=True)
        save(tier, two)
        until(lambda: tier.stats().saves.get("error"))
        assert load(tier, one) == "missing"


@pytest.fixture
def slow_disk(monkeypatch):
    """os.rename waits until the event is set."""
    event, real = threading.Event(), os.rename

    def rename(source, target):
        assert event.wait(30)
        real(source, target)

    monkeypatch.setattr(disk.os, "rename", rename)
    yield event
    event.set()


def test_a_full_queue_drops_and_never_waits(folder, slow_disk):
    blocks = blocks_of(10)
    with opened(folder, queue_bytes=3 * 96) as tier:
        begin = time.monotonic()
        kept = [tier.save(b, 0, payload_of(b)) for b in blocks]
        assert time.monotonic() - begin < 5
        assert kept == [True] * 3 + [False] * 7
        assert tier.stats().saves == {"full": 7} and tier.stats().queued_bytes == 3 * 96
        slow_disk.set()
        until(lambda: not tier.stats().queued_bytes)
        assert tier.has([b.key for b in blocks]) == 3
        save(tier, blocks[5])  # dropped once is not refused for ever


def test_loads_do_not_wait_for_saves(folder, slow_disk):
    one, two = blocks_of(2)
    slow_disk.set()
    fill(folder, [one])
    slow_disk.clear()
    with opened(folder) as tier:
        save(tier, two)
        assert load(tier, one) == payload_of(one)
        slow_disk.set()


def test_closing_writes_queued_parts_or_counts_them(folder, slow_disk):
    blocks = blocks_of(3)
    tier = DiskTier(folder, FACTS, ROOM)
    for block in blocks:
        save(tier, block)
    until(lambda: list(folder.glob("tmp-*")))
    threading.Timer(0.3, slow_disk.set).start()
    tier.close(0.05)
    until(lambda: tier.stats().saves == {"saved": 1, "closed": 2})
    assert not tier.save(blocks[1], 0, payload_of(blocks[1]))


def test_a_cancelled_load_leaves_nothing(folder):
    blocks = blocks_of(20)
    fill(folder, blocks)
    with opened(folder) as tier:
        for block in blocks:
            tier.cancel(tier.start_load(block))
        stats = tier.stats()
        assert stats.open_loads == stats.open_bytes == 0
        assert load(tier, blocks[0]) == payload_of(blocks[0])
