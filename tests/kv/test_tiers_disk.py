"""DiskTier: what it gives is right, whatever happens to its files; what it keeps is bounded; it never waits."""

import errno
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvasir.errors import ConfigError
from kvasir.kv.tiers import disk, record
from kvasir.kv.tiers.block import Block, Facts
from kvasir.kv.tiers.disk import DiskTier
from tests.kv._tiers import FACTS, blocks_of, facts_of, load, payload_of, until

ROOM = 1 << 20


@contextmanager
def opened(folder: Path, facts: Facts = FACTS, max_bytes: int = ROOM, **bounds: int) -> Iterator[DiskTier]:
    tier = DiskTier(folder, facts, max_bytes, **bounds)
    try:
        assert tier.wait_scanned(30)
        yield tier
    finally:
        tier.close(30.0)


def save(tier: DiskTier, block: Block, group: int = 0) -> None:
    assert tier.save(block, group, payload_of(block, group, tier.facts))


def saved(tier: DiskTier) -> int:
    return tier.stats().saves.get("saved", 0)


def fill(folder: Path, blocks: list[Block], facts: Facts = FACTS, max_bytes: int = ROOM) -> None:
    with opened(folder, facts, max_bytes) as tier:
        for block in blocks:
            save(tier, block)
    assert tier.stats().saves == {"saved": len(blocks)}


def path_of(folder: Path, block: Block, group: int = 0) -> Path:
    return folder / block.key.hex()[:2] / f"{block.key.hex()}.{group}"


def parts(folder: Path) -> list[Path]:
    return [p for p in folder.glob("??/*") if p.is_file()]


def size_of(folder: Path) -> int:
    """Bytes of all files; of a folder that nobody changes meanwhile."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "tier"


# -- giving back -----------------------------------------------------------------------------------------------


def test_round_trip_over_a_restart(folder):
    blocks = blocks_of(5)
    keys = [b.key for b in blocks]
    with opened(folder) as tier:
        assert tier.has(keys) == 0
        for block in blocks[:3]:
            save(tier, block, 0)
            save(tier, block, 1)
        save(tier, blocks[4])
        until(lambda: tier.stats().saves == {"saved": 7})
        assert tier.has(keys) == 3 and tier.has(keys, 1) == 3
    with opened(folder) as tier:
        assert tier.has(keys) == 3 and tier.has(keys[4:]) == 1 and tier.has(keys[4:], 1) == 0
        for block in blocks[:3]:
            assert [load(tier, block, g) for g in (0, 1)] == [payload_of(block, g) for g in (0, 1)]
        assert load(tier, blocks[3]) == "missing"
        stats = tier.stats()
        assert stats.loads == {"loaded": 6, "missing": 1} and stats.bytes_loaded == 3 * (96 + 40)
        assert stats.num_parts == 7 and stats.num_bytes == size_of(folder) and stats.read_rate > 0
        assert stats.open_loads == stats.open_bytes == stats.queued_bytes == 0


def test_what_comes_back_cannot_be_written_to(folder):
    (block,) = blocks_of(1)
    fill(folder, [block])
    with opened(folder) as tier:
        result = tier.poll(tier.start_load(block), 30.0)
        assert isinstance(result, memoryview) and result.readonly


def test_any_buffer_can_be_saved(folder):
    facts = facts_of(64)
    blocks = blocks_of(3)
    with opened(folder, facts) as tier:
        for block, kind in zip(blocks, (bytes, bytearray, lambda b: memoryview(b).cast("i")), strict=True):
            assert tier.save(block, 0, kind(payload_of(block, 0, facts)))
    with opened(folder, facts) as tier:
        assert [load(tier, b) for b in blocks] == [payload_of(b, 0, facts) for b in blocks]


def test_a_part_is_kept_once(folder):
    (block,) = blocks_of(1)
    with opened(folder) as tier:
        save(tier, block)
        assert not tier.save(block, 0, payload_of(block))  # queued or written
        until(lambda: saved(tier))
        assert not tier.save(block, 0, payload_of(block))
        assert tier.stats().saves == {"saved": 1, "known": 2}


def test_other_namespace_with_equal_ids_is_another_block(folder):
    ours, theirs = blocks_of(3), blocks_of(3, b"other tenant")
    fill(folder, theirs)
    with opened(folder) as tier:
        assert tier.has([b.key for b in ours]) == 0
        assert {load(tier, b) for b in ours} == {"missing"}
        assert [load(tier, b) for b in theirs] == [payload_of(b) for b in theirs]


# -- files that are not what their names say -------------------------------------------------------------------


def assert_refused(folder: Path, block: Block, reasons: tuple[str, ...], facts: Facts = FACTS) -> None:
    """The part is not given, the reason counted, the file gone, and the place free for a good one."""
    with opened(folder, facts) as tier:
        assert tier.has([block.key]) == 1
        reason = load(tier, block)
        assert reason in reasons and tier.stats().loads == {reason: 1}
        assert not os.path.lexists(path_of(folder, block))
        assert tier.has([block.key]) == 0 and load(tier, block) == "missing"
        save(tier, block)
        until(lambda: saved(tier))
        assert load(tier, block) == payload_of(block, 0, facts)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(at=st.integers(0), flip=st.integers(1, 255))
def test_any_flipped_byte_is_noticed(tmp_path, at, flip):
    folder = tmp_path / uuid.uuid4().hex
    (block,) = blocks_of(1)
    fill(folder, [block])
    path = path_of(folder, block)
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= flip
    path.write_bytes(data)
    assert_refused(folder, block, ("corrupt", "truncated", "stale", "foreign"))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(at=st.integers(0))
def test_any_truncation_is_noticed(tmp_path, at):
    folder = tmp_path / uuid.uuid4().hex
    (block,) = blocks_of(1)
    fill(folder, [block])
    path = path_of(folder, block)
    os.truncate(path, at % path.stat().st_size)
    assert_refused(folder, block, ("truncated",))


def test_stale_and_foreign_files_are_removed(folder, tmp_path):
    (block,) = blocks_of(1)
    for i, (made, reason) in enumerate(
        [(replace(FACTS, numerics="n0"), "stale"), (replace(FACTS, model="tiny@2"), "foreign")]
    ):
        fill(tmp_path / str(i), [block], made)
        assert_refused(tmp_path / str(i), block, (reason,))


def test_a_record_under_the_name_of_another_block_is_foreign(folder):
    one, two = blocks_of(2)
    fill(folder, [one, two])
    os.replace(path_of(folder, one), path_of(folder, two))
    assert_refused(folder, two, ("foreign",))


def test_what_is_not_a_file_is_not_followed(folder, tmp_path):
    """A link to a good record, a pipe that nobody writes, a folder: none is served, none is waited for."""
    blocks = blocks_of(3)
    fill(folder, blocks)
    with opened(folder) as tier:  # which knows the three names
        good = tmp_path / "good"
        os.replace(path_of(folder, blocks[0]), good)
        path_of(folder, blocks[0]).symlink_to(good)
        path_of(folder, blocks[1]).unlink()
        os.mkfifo(path_of(folder, blocks[1]))
        path_of(folder, blocks[2]).unlink()
        path_of(folder, blocks[2]).mkdir()
        assert [load(tier, b) for b in blocks] == ["io", "corrupt", "corrupt"]
        assert good.exists()
    with opened(folder) as tier:
        assert tier.stats().num_parts == 0


def test_a_file_that_vanishes_is_a_miss(folder):
    (block,) = blocks_of(1)
    fill(folder, [block])
    with opened(folder) as tier:
        path_of(folder, block).unlink()
        assert load(tier, block) == "missing" and tier.has([block.key]) == 0


def test_a_file_that_shrinks_while_it_is_read(folder, monkeypatch):
    (block,) = blocks_of(1)
    fill(folder, [block])
    with opened(folder) as tier:
        monkeypatch.setattr(disk.os, "readv", lambda fd, buffers: 0)
        assert load(tier, block) == "truncated"


def test_an_error_of_the_disk_is_counted(folder, monkeypatch):
    (block,) = blocks_of(1)
    fill(folder, [block])

    def broken(fd, buffers):
        raise OSError(errno.EIO, "the disk is broken")

    with opened(folder) as tier:
        monkeypatch.setattr(disk.os, "readv", broken)
        assert load(tier, block) == "io" and tier.has([block.key]) == 0


# -- the folder ------------------------------------------------------------------------------------------------


def test_folder_and_files_are_of_this_user_alone(folder):
    old = os.umask(0)
    try:
        fill(folder, blocks_of(3))
    finally:
        os.umask(old)
    modes = {stat.S_IMODE(p.stat().st_mode) for p in [folder, *folder.glob("??")]}
    assert modes == {0o700}
    assert {stat.S_IMODE(p.stat().st_mode) for p in parts(folder)} == {0o600}


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o750, 0o777])
def test_a_folder_open_to_others_is_refused(folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="open to others"):
        DiskTier(folder, FACTS, ROOM)


def test_a_link_or_a_file_is_refused(folder, tmp_path):
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    folder.symlink_to(real)
    with pytest.raises(ConfigError, match="not a folder"):
        DiskTier(folder, FACTS, ROOM)
    folder.unlink()
    folder.write_text("")
    with pytest.raises(ConfigError):
        DiskTier(folder, FACTS, ROOM)


def test_a_folder_of_another_user_is_refused(folder, monkeypatch):
    folder.mkdir(mode=0o700)
    monkeypatch.setattr("os.getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="another user"):
        DiskTier(folder, FACTS, ROOM)


def test_names_that_are_not_ours_are_left_alone(folder):
    (block,) = blocks_of(1)
    fill(folder, [block])
    key = block.key.hex()
    others = [folder / "readme", folder / key[:2] / "x", folder / "zz" / f"{key}.0", folder / key[:2] / f"{key}.00"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_text("not a part")
    with opened(folder, max_bytes=1 << 16) as tier:
        assert tier.stats().num_parts == 1
    assert all(p.exists() for p in others)


def test_leftovers_of_the_dead_are_removed_and_of_the_living_are_not(folder):
    fill(folder, blocks_of(1))
    dead, alive = folder / "tmp-0123456789abcdef", folder / "tmp-fedcba9876543210"
    dead.write_bytes(b"half a part")
    alive.write_bytes(b"half a part")
    with alive.open() as f:
        disk.fcntl.flock(f, disk.fcntl.LOCK_EX)
        with opened(folder):
            assert not dead.exists() and alive.exists()
    with opened(folder):
        assert not alive.exists()


def test_a_file_taken_for_a_dead_ones_is_made_again(folder, monkeypatch):
    """Another engine looks at our new file before we hold its lock, and removes it."""
    (block,) = blocks_of(1)
    real, taken = disk.fcntl.flock, []

    def late(fd, operation):
        if not taken:
            taken.extend(folder.glob("tmp-*"))
            taken[0].unlink()
        real(fd, operation)

    with opened(folder) as tier:
        monkeypatch.setattr(disk.fcntl, "flock", late)
        save(tier, block)
        until(lambda: saved(tier))
        assert len(taken) == 1 and load(tier, block) == payload_of(block)


# -- the bound -------------------------------------------------------------------------------------------------


def room_for(n: int, facts: Facts) -> int:
    """Bytes of n files."""
    block = blocks_of(1)[0]
    payload = payload_of(block, 0, facts)
    return n * (len(record.seal(facts, block, 0, memoryview(payload))) + len(payload))


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
def test_a_full_disk_is_counted_and_left_alone_for_a_while(folder, monkeypatch, written):
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
        tier._resume_at = 0.0
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


def test_a_folder_that_is_gone_does_no_harm(folder):
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


def test_closing_writes_what_is_queued_or_counts_it(folder, slow_disk):
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


# -- other processes -------------------------------------------------------------------------------------------

WRITER = """
import sys, time
from pathlib import Path
from kvasir.kv.tiers import disk
from tests.kv._tiers import blocks_of, facts_of, payload_of

def drain(fd, buffer):
    while buffer:
        n = disk.os.write(fd, buffer[:4096])
        buffer = buffer[n:]
        time.sleep(0.0005)

disk._drain = drain  # so slow that a death is nearly always in the middle of a write
facts = facts_of(64_000)
tier = disk.DiskTier(Path(sys.argv[1]), facts, 1 << 30)
tier.wait_scanned(30)
for block in blocks_of(100_000, sys.argv[2].encode()):
    while tier.stats().queued_bytes > 200_000:
        time.sleep(0.001)
    assert tier.save(block, 0, payload_of(block, 0, facts)), tier.stats()
"""


def started(script: str, *args: object) -> subprocess.Popen:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), str(root)])
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, "-c", script, *map(str, args)], stdout=subprocess.PIPE, env=env, text=True)


def finish(process: subprocess.Popen) -> str:
    out, _ = process.communicate(timeout=100)
    return out


def test_a_writer_killed_in_the_middle_leaves_nothing_wrong(folder):
    """After every death: each file that has a part's name is whole and right; the half written ones are gone."""
    facts = facts_of(64_000)
    delays = random.Random(4)
    halves = 0
    for life in range(8):
        process = started(WRITER, folder, f"life {life}")
        until(lambda p=process, n=len(parts(folder)): p.poll() is not None or len(parts(folder)) > n, 60)
        assert process.poll() is None, "the writer ended by itself"
        time.sleep(delays.uniform(0.0, 0.05))
        process.send_signal(signal.SIGKILL)
        finish(process)
        halves += len(list(folder.glob("tmp-*")))
    found = len(parts(folder))
    with opened(folder, facts, 1 << 30) as tier:
        assert not list(folder.glob("tmp-*"))
        served = 0
        for life in range(8):
            for block in blocks_of(2000, f"life {life}".encode()):
                if tier.has([block.key]):
                    assert load(tier, block) == payload_of(block, 0, facts)
                    served += 1
        assert tier.stats().loads == {"loaded": served}
    assert served == found > 0 and halves > 0


NEIGHBOUR = """
import random, sys, time
from pathlib import Path
from kvasir.kv.tiers.disk import DiskTier
from tests.kv._tiers import blocks_of, facts_of, load, payload_of

folder, seed, rounds, bound = Path(sys.argv[1]), *map(int, sys.argv[2:])
facts, choice = facts_of(8_000), random.Random(seed)
blocks = blocks_of(40)
tier = DiskTier(folder, facts, bound)
assert tier.wait_scanned(30)
for _ in range(rounds):
    block = choice.choice(blocks)
    if choice.random() < 0.5:
        tier.save(block, 0, payload_of(block, 0, facts))
        while tier.stats().queued_bytes > 20_000:
            time.sleep(0.001)
    else:
        assert load(tier, block) in (payload_of(block, 0, facts), "missing")
tier.close(30)
stats = tier.stats()
assert not stats.saves.get("error") and set(stats.loads) <= {"loaded", "missing"}, stats
print(stats.loads["loaded"], stats.saves["saved"], stats.evicted)
"""


def test_two_processes_on_one_folder(folder):
    """Both write, read and evict the same few blocks: neither sees an error nor a wrong byte."""
    bound = room_for(15, facts_of(8_000)) + record.MAX_HEADER
    pair = [started(NEIGHBOUR, folder, seed, 500, bound) for seed in (1, 2)]
    outs = [finish(process) for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    assert all(int(n) > 0 for out in outs for n in out.split())
    with opened(folder, facts_of(8_000), bound) as tier:
        assert tier.stats().num_bytes == size_of(folder) <= bound
