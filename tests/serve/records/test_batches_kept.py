"""How long batches and their files stay: what has ended leaves, oldest first, what is under way never does, and a key
can get rid of its own."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack

import pytest

from kvasir.errors import LimitExceeded
from kvasir.serve.dialects.openai.files import pieces
from kvasir.serve.records.responses import READERS
from kvasir.serve.records.store import Records, new_id
from tests.serve.records.test_batches import ANN, AS_ANN, AS_BOB, BOB, line, lines_of, serving, start, until, upload
from tests.serve.records.test_batches_hostile import many
from tests.serve.running import make_front

SLOW = {"step_seconds": 0.002, "max_model_len": 4000}
LONG = [line("a", max_tokens=3000)]


# -- records -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [False, True])
async def test_pinned_records_are_never_evicted(tmp_path, on_disk):
    now, pinned = [0.0], set()
    records = Records(
        tmp_path / "r" if on_disk else None,
        **{"max_count": 3, "max_bytes": 1000, "max_age": 10, "pinned": pinned.__contains__, "clock": lambda: now[0]},
    )
    first, *others = ids = [new_id("x") for _ in range(5)]
    pinned.add(first)
    for id in ids:
        await records.put("ann", id, b"1")
    assert {id for _, id in records.ids} == {first, *others[-2:]}
    now[0] = 11
    assert await records.get("ann", first) == b"1" and await records.get("ann", others[-1]) is None
    now[0] = 22
    await records.sweep()
    assert {id for _, id in records.ids} == {first}
    pinned |= {*ids}
    for id in others[:2]:
        await records.put("ann", id, b"1")
    with pytest.raises(LimitExceeded):
        await records.put("ann", others[2], b"1")
    await records.put("ann", first, b"22")  # in its own place
    await records.put("bob", others[2], b"1")
    pinned.clear()
    await records.put("ann", others[3], b"1")
    assert len(records.ids) == 4
    records.close()


async def test_expired_records_of_every_key_are_deleted(tmp_path):
    now = [0.0]
    records = Records(tmp_path / "r", max_count=9, max_bytes=99, max_age=10, refuse=True, clock=lambda: now[0])
    for owner in ("ann", "bob", "gone"):
        await records.put(owner, new_id("x"), b"1")
    now[0] = 8
    kept = new_id("x")
    await records.put("gone", kept, b"1")
    now[0] = 12
    await records.sweep()
    assert {file.stem for file in (tmp_path / "r").rglob("x_*.json")} == {kept}
    await records.drop({kept})
    assert not records.ids and not list((tmp_path / "r").rglob("x_*.json"))
    records.close()


# -- batches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [False, True])
async def test_the_oldest_finished_batch_is_evicted_first(tmp_path, on_disk):
    folder = tmp_path / "data" if on_disk else None
    async with serving(folder, keys=(ANN, BOB), batch_count=3) as http:
        file = await upload(http, [line("a")], AS_ANN)
        other = await start(http, [line("a")], headers=AS_BOB)
        ids = []
        for _ in range(5):
            (batch,) = await many(http, file, 1, AS_ANN)
            await until(http, batch, "completed", headers=AS_ANN)
            ids.append(batch["id"])
        listed = (await http.get("/v1/batches", headers=AS_ANN)).json()["data"]
        assert {batch["id"] for batch in listed} == {*ids[2:]}
        assert (await http.get(f"/v1/batches/{ids[0]}", headers=AS_ANN)).status_code == 404
        await until(http, other, "completed", headers=AS_BOB)


async def test_running_batches_are_never_evicted():
    async with serving(front=make_front(**SLOW), batch_count=2) as http:
        file = await upload(http, LONG)
        batches = await many(http, file, 2)
        (refused,) = await many(http, file, 1)
        assert "wait" in refused["error"]["message"]
        for batch in batches:
            assert (await http.post(f"/v1/batches/{batch['id']}/cancel")).status_code == 200
            await until(http, batch, "cancelled")
        (batch,) = await many(http, file, 1)
        assert batch["status"] == "validating"
        await http.post(f"/v1/batches/{batch['id']}/cancel")
        await until(http, batch, "cancelled")


async def test_a_batch_that_has_ended_can_be_deleted_by_its_key_alone(tmp_path):
    async with serving(tmp_path / "data", make_front(**SLOW), keys=(ANN, BOB)) as http:
        batch = await start(http, LONG, headers=AS_ANN)
        path = f"/v1/batches/{batch['id']}"
        assert (await http.delete(path, headers=AS_BOB)).status_code == 404
        early = await http.delete(path, headers=AS_ANN)
        assert early.status_code == 400 and "cancel" in early.json()["error"]["message"]
        await http.post(f"{path}/cancel", headers=AS_ANN)
        batch = await until(http, batch, "cancelled", headers=AS_ANN)
        deleted = {"id": batch["id"], "object": "batch", "deleted": True}
        assert (await http.delete(path, headers=AS_ANN)).json() == deleted
        for method in ("GET", "DELETE"):
            assert (await http.request(method, path, headers=AS_ANN)).status_code == 404
        assert len(await lines_of(http, batch["error_file_id"], AS_ANN)) == 1, "files are deleted by themselves"
    assert not list((tmp_path / "data" / "batches").rglob("batch_*"))


# -- files ---------------------------------------------------------------------------------------------------


async def test_a_file_outlives_its_time_while_a_batch_reads_it(tmp_path, monkeypatch):
    async with serving(tmp_path / "data", make_front(**SLOW)) as http:
        batch = await start(http, LONG)
        file = f"/v1/files/{batch['input_file_id']}"
        now = time.time()
        monkeypatch.setattr("kvasir.serve.records.batches.files.time.time", lambda: now + 31 * 86400)
        await http.app.state.batches.sweep()
        assert (await http.get(file)).status_code == 200
        await http.post(f"/v1/batches/{batch['id']}/cancel")
        batch = await until(http, batch, "cancelled")
        async with asyncio.timeout(10):
            while http.app.state.batches.unfinished:
                await asyncio.sleep(0.01)
        await http.app.state.batches.sweep()
        assert {path.stem for path in (tmp_path / "data" / "file-contents").rglob("*_*.json")} == {
            batch["error_file_id"]
        }
        assert (await http.get(file)).status_code == 404


async def test_records_of_removed_keys_expire(tmp_path, monkeypatch):
    async with serving(tmp_path / "data", keys=(ANN,)) as http:
        batch = await until(http, await start(http, [line("a")], headers=AS_ANN), "completed", headers=AS_ANN)
        asked = {"input": "hello", "max_output_tokens": 2}
        assert (await http.post("/v1/responses", json=asked, headers=AS_ANN)).status_code == 200
    orphan = tmp_path / "data" / "batch-lines" / f"{new_id('batch')}.jsonl"
    orphan.write_text("{}\n")
    month_ago = time.time() - 31 * 86400
    for record in (tmp_path / "data").rglob("*_*.json"):
        os.utime(record, (month_ago, month_ago))
    async with serving(tmp_path / "data", keys=(BOB,)) as http:
        assert not orphan.exists(), "lines of a batch that is not under way"
        state, now = http.app.state, time.time()
        kinds = ("batches", "files", "file-contents", "responses")
        left = {kind: len(list((tmp_path / "data" / kind).rglob("*_*.json"))) for kind in kinds}
        assert left == {"batches": 1, "files": 2, "file-contents": 2, "responses": 1}, batch
        later = lambda: now + 31 * 86400  # noqa: E731
        monkeypatch.setattr("kvasir.serve.records.batches.files.time.time", later)
        for kept in (state.batches, state.responses):
            await kept.sweep()
        assert not [file for kind in kinds for file in (tmp_path / "data" / kind).rglob("*_*.json")]


async def test_a_batch_that_cannot_even_be_failed_is_tried_again(tmp_path, monkeypatch):
    """The key is gone and the disk is full: it ends when there is room, and is not under way for ever."""
    monkeypatch.setattr("kvasir.serve.records.batches.work.RETRY_SECONDS", 0.01)
    async with serving(tmp_path / "data", make_front(**SLOW), keys=(ANN, BOB)) as http:
        batches = http.app.state.batches
        batch = await start(http, [line(f"c{i}", max_tokens=60) for i in range(50)], headers=AS_ANN)
        await until(http, batch, "in_progress", headers=AS_ANN)
        put, failures = Records.put, iter([True, True])

        async def full(self, owner, id, *rest, **fields):
            if id == batch["id"] and next(failures, False):
                raise OSError(28, "No space left on device")
            await put(self, owner, id, *rest, **fields)

        monkeypatch.setattr(Records, "put", full)
        run = batches.unfinished[batch["id"]]
        http.app.state.ring.take((BOB,))
        async with asyncio.timeout(20):
            while batches.unfinished:
                await asyncio.sleep(0.01)
        assert run.batch["status"] == "failed" and not [*failures]


# -- readers and shares --------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [False, True])
async def test_a_download_is_completed_although_the_file_is_deleted(tmp_path, on_disk, monkeypatch):
    monkeypatch.setattr("kvasir.serve.dialects.openai.files.PIECE", 1000)
    async with serving(tmp_path / "data" if on_disk else None) as http:
        data = bytes(range(256)) * 40
        file = await upload(http, data)
        store = http.app.state.batches.files
        opened, size = await store.open("", file["id"])
        await store.delete("", file["id"])
        read = [piece async for piece in pieces(opened)]
        assert b"".join(read) == data and size == len(data) and max(map(len, read)) == 1000
        opened.close()
        file = await upload(http, data)
        answer = await http.get(f"/v1/files/{file['id']}/content")
        assert answer.content == data and answer.headers["content-length"] == str(len(data))


async def test_few_records_per_key_are_loaded_for_slow_readers():
    """A slow reader delays no other request."""
    async with serving(keys=(ANN, BOB)) as http:
        asked = {"input": "hello", "max_output_tokens": 2}
        ids = {}
        for name, headers in (("ann", AS_ANN), ("bob", AS_BOB)):
            ids[name] = (await http.post("/v1/responses", json=asked, headers=headers)).json()["id"]
        turn = http.app.state.responses.turn("ann")
        async with AsyncExitStack() as stack:
            for _ in range(READERS):
                await stack.enter_async_context(turn)
            waiting = [
                asyncio.ensure_future(http.get(f"/v1/responses/{ids['ann']}{path}", headers=AS_ANN))
                for path in ("", "/input_items")
            ]
            assert (await http.get(f"/v1/responses/{ids['bob']}", headers=AS_BOB)).status_code == 200
            assert not any(task.done() for task in waiting)
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]
        for _ in range(READERS + 1):  # each gives its turn back
            assert (await http.get(f"/v1/responses/{ids['ann']}", headers=AS_ANN)).status_code == 200


async def test_shares_follow_the_number_of_keys():
    async with serving(keys=(ANN,), file_bytes=1000, max_file=800, stored_bytes=1000) as http:
        state = http.app.state
        await upload(http, b"x" * 700, AS_ANN)
        state.ring.take((ANN, BOB))
        assert state.batches.files.max_bytes == state.responses.records.max_bytes == 500
        over = await http.post(
            "/v1/files", files={"file": ("x", b"x" * 501)}, data={"purpose": "batch"}, headers=AS_BOB
        )
        assert over.status_code == 413
        await upload(http, b"x" * 500, AS_BOB)
        full = await http.post("/v1/files", files={"file": ("x", b"x")}, headers=AS_ANN, data={"purpose": "batch"})
        assert full.status_code == 429 and "700 of 500" in full.json()["error"]["message"]
