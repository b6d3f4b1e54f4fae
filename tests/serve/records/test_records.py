"""Records: whatever is put, read, deleted and restarted, a key sees its own within its share, on disk as in memory."""

from __future__ import annotations

import asyncio
import os
import stat
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.errors import ConfigError, LimitExceeded
from kvasir.serve.records.store import Records, is_id, new_id
from tests.examples import examples

IDS = [f"resp_{i:048x}" for i in range(5)]
OWNERS = ["", "ann", "Ann", "..", "a.b-c_d"]
BOUNDS = {"max_count": 3, "max_bytes": 100, "max_age": 50.0}
STEP = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(OWNERS), st.sampled_from(IDS), st.binary(max_size=60)),
    st.tuples(st.just("get"), st.sampled_from(OWNERS), st.sampled_from(IDS), st.just(b"")),
    st.tuples(st.just("delete"), st.sampled_from(OWNERS), st.sampled_from(IDS), st.just(b"")),
    st.tuples(st.just("wait"), st.just(""), st.sampled_from(IDS), st.binary(max_size=30)),
    st.tuples(st.just("restart"), st.just(""), st.sampled_from(IDS), st.just(b"")),
)


class Model:
    """The same by definition."""

    def __init__(self):
        self.kept: dict[str, OrderedDict[str, tuple[bytes, float]]] = {owner: OrderedDict() for owner in OWNERS}

    def put(self, owner, id, data, now):
        entries = self.kept[owner]
        entries.pop(id, None)
        entries[id] = (data, now)
        while len(entries) > 3 or sum(len(d) for d, _ in entries.values()) > 100 or self._old(entries, now):
            entries.popitem(last=False)

    def _old(self, entries, now):
        return now - next(iter(entries.values()))[1] > 50

    def get(self, owner, id, now):
        data, used = self.kept[owner].get(id, (None, 0))
        if data is None or now - used > 50:
            self.kept[owner].pop(id, None)
            return None
        self.kept[owner][id] = (data, now)
        self.kept[owner].move_to_end(id)
        return data


@examples(40)
@given(steps=st.lists(STEP, max_size=40), on_disk=st.booleans())
def test_records_behave_as_the_model_of_them(tmp_path_factory, steps, on_disk):
    folder = tmp_path_factory.mktemp("data") / "records" if on_disk else None

    async def main():
        now = [1000.0]

        def stay():
            return now[0]

        records, model = Records(folder, **BOUNDS, clock=stay), Model()
        for kind, owner, id, data in steps:
            now[0] += 1
            if kind == "put":
                await records.put(owner, id, data)
                model.put(owner, id, data, now[0])
            elif kind == "get":
                assert await records.get(owner, id) == model.get(owner, id, now[0])
            elif kind == "delete":
                assert await records.delete(owner, id) == (model.kept[owner].pop(id, None) is not None)
            elif kind == "wait":
                now[0] += len(data)
            elif on_disk:
                records.close()
                records = Records(folder, **BOUNDS, clock=stay)
        records.close()

    asyncio.run(main())


async def fill(records: Records, owner: str = "ann") -> str:
    id = new_id("resp")
    await records.put(owner, id, b"{}")
    return id


async def test_files_are_visible_only_to_their_owner(tmp_path):
    records = Records(tmp_path / "a" / "b", **BOUNDS)
    id = await fill(records)
    (path,) = (tmp_path / "a" / "b").rglob("*.json")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.stem == id and path.parent.name.startswith("ann-")


async def test_a_records_folder_is_private_and_locked_by_one_server(tmp_path):
    records = Records(tmp_path / "x", **BOUNDS)
    with pytest.raises(ConfigError, match="another server"):
        Records(tmp_path / "x", **BOUNDS)
    records.close()
    Records(tmp_path / "x", **BOUNDS).close()
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "x")
    (tmp_path / "file").touch()
    for name in ("open", "link", "file", "file/x"):
        with pytest.raises(ConfigError):
            Records(tmp_path / name, **BOUNDS)


async def test_half_written_files_are_not_records(tmp_path):
    records = Records(tmp_path / "x", **BOUNDS)
    id = await fill(records)
    records.close()
    (path,) = (tmp_path / "x").rglob("*.json")
    path.with_suffix(".part").write_bytes(b'{"half')
    for name in ("../x.json", "resp_1.json", "passwd", f"{id}.txt"):
        (path.parent / name).touch()
    os.symlink("/etc/hostname", path.parent / f"resp_{7:048x}.json")
    records = Records(tmp_path / "x", **BOUNDS)
    assert await records.get("ann", id) == b"{}"
    assert await records.get("ann", f"resp_{7:048x}") is None
    assert not path.with_suffix(".part").exists()
    path.unlink()
    assert await records.get("ann", id) is None


async def test_a_record_too_large_is_refused_and_a_failed_write_leaves_no_file(tmp_path):
    records = Records(tmp_path / "x", **BOUNDS)
    id = await fill(records)
    with pytest.raises(LimitExceeded):
        await records.put("ann", id, b"x" * 101)
    assert await records.get("ann", id) == b"{}"
    (path,) = (tmp_path / "x").rglob("*.json")
    (path.parent / f"{IDS[0]}.json").mkdir()
    with pytest.raises(OSError):
        await records.put("ann", IDS[0], b"x")
    assert await records.get("ann", IDS[0]) is None and not list(path.parent.glob("*.part"))


def test_ids_cannot_be_paths():
    assert is_id(new_id("resp"), "resp") and not is_id(new_id("file"), "resp")
    for bad in ("resp_", "resp_../../x", f"resp_{'A' * 48}", f"resp_{'0' * 47}", f"resp_{'0' * 48}\n", ""):
        assert not is_id(bad, "resp")


async def test_expired_records_make_room_in_a_full_share():
    now = 0.0
    records = Records(None, max_count=2, max_bytes=99, max_age=50, refuse=True, clock=lambda: now)
    for id in IDS[:2]:
        await records.put("ann", id, b"x")
    with pytest.raises(LimitExceeded):
        await records.put("ann", IDS[2], b"x")
    now = 51.0
    await records.put("ann", IDS[2], b"x")
    assert await records.all("ann") == [b"x"]
