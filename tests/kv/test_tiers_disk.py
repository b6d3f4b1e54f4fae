"""DiskTier: what it gives is right, whatever happens to its files, and its folder is of one user alone."""

import errno
import os
import stat
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from kvasir.errors import ConfigError
from kvasir.kv.tiers import disk
from kvasir.kv.tiers.block import StoredBlock, StoreFacts
from kvasir.kv.tiers.disk import DiskTier
from tests.examples import examples
from tests.kv._disk import ROOM, fill, opened, parts, path_of, save, saved, size_of
from tests.kv._tiers import FACTS, blocks_of, facts_of, load, payload_of, until

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


def test_loaded_bytes_are_read_only(folder):
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


def assert_refused(folder: Path, block: StoredBlock, reasons: tuple[str, ...], facts: StoreFacts = FACTS) -> None:
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


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
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


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(at=st.integers(0))
def test_any_truncation_is_noticed(tmp_path, at):
    folder = tmp_path / uuid.uuid4().hex
    (block,) = blocks_of(1)
    fill(folder, [block])
    path = path_of(folder, block)
    os.truncate(path, at % path.stat().st_size)
    assert_refused(folder, block, ("truncated",))


def test_stale_and_foreign_files_are_removed(tmp_path):
    (block,) = blocks_of(1)
    for i, (made, reason) in enumerate(
        [(replace(FACTS, numerics="n0"), "stale"), (replace(FACTS, model="tiny@2"), "foreign")]
    ):
        folder = tmp_path / str(i)
        fill(folder, [block], made)
        path_of(folder, block).parent.mkdir(mode=0o700, exist_ok=True)
        os.replace(path_of(folder, block, model=made.model), path_of(folder, block))
        assert_refused(folder, block, (reason,))


def test_models_share_a_folder_without_meeting(folder):
    (block,) = blocks_of(1)
    other = replace(FACTS, model="tiny@2")
    fill(folder, [block])
    fill(folder, [block], other)
    for facts in (FACTS, other):
        with opened(folder, facts) as tier:
            assert tier.stats().num_parts == 2 and load(tier, block) == payload_of(block)


def test_a_record_under_the_name_of_another_block_is_foreign(folder):
    one, two = blocks_of(2)
    fill(folder, [one, two])
    os.replace(path_of(folder, one), path_of(folder, two))
    assert_refused(folder, two, ("foreign",))


def test_links_pipes_and_folders_are_not_followed(folder, tmp_path):
    """A link to a valid record, a pipe without a writer, a folder: none is served or waited for."""
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
    with pytest.raises(ConfigError, match="open"):
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


def test_files_with_foreign_names_are_not_touched(folder):
    (block,) = blocks_of(1)
    fill(folder, [block])
    key = path_of(folder, block).name.removesuffix(".0")
    others = [folder / "readme", folder / key[:2] / "x", folder / "zz" / f"{key}.0", folder / key[:2] / f"{key}.00"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_text("not a part")
    with opened(folder, max_bytes=1 << 16) as tier:
        assert tier.stats().num_parts == 1
    assert all(p.exists() for p in others)


def test_leftovers_of_dead_processes_are_removed_and_of_live_ones_are_not(folder):
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


def test_a_file_removed_as_stale_is_recreated(folder, monkeypatch):
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
