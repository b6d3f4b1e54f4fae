"""Files and batches under hostile clients: nothing leaks, and no client takes more than its share."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvasir.errors import InvalidRequest
from kvasir.serve.records.batches.lines import BatchJournal, LineTask, answered, read_tasks
from kvasir.serve.records.batches.upload import parse_form
from kvasir.serve.records.store import Records, new_id
from kvasir.serve.settings import ServeSettings
from tests.examples import examples
from tests.serve.records.test_batches import (
    ANN,
    AS_ANN,
    AS_BOB,
    BOB,
    CHAT,
    line,
    lines_of,
    serving,
    start,
    until,
    upload,
)
from tests.serve.running import make_front

FORM = {"content-type": "multipart/form-data; boundary=b"}
HEADS = ("name", "filename", "filename*", "filename*0", "filename*1*", "x")
TEXTS = (
    "file",
    "purpose",
    "batch",
    "utf-7''%2B2AA-",
    "unicode_escape''%5Cud800",
    "hex''00",
    "a\x00b",
    "é",
    '"',
    ";",
    "",
)


def form(*heads: bytes) -> bytes:
    parts = [b"--b\r\nContent-Disposition: form-data; " + head + b"\r\n\r\nbatch\r\n" for head in heads]
    return b"".join(parts) + b"--b--\r\n"


@pytest.mark.parametrize("name", [b"utf-7''%2B2AA-", b"unicode_escape''%5Cud800"])
async def test_a_file_name_that_is_no_text_is_refused_and_leaves_no_file(tmp_path, name):
    async with serving(tmp_path / "data") as http:
        body = form(b'name="purpose"', b'name="file"; filename*=' + name)
        answer = await http.post("/v1/files", content=body, headers=FORM)
        assert answer.status_code == 400 and "malformed" in answer.json()["error"]["message"]
        assert not [*(tmp_path / "data" / "file-contents").rglob("*_*")]


@examples(300)
@given(st.lists(st.lists(st.tuples(st.sampled_from(HEADS), st.sampled_from(TEXTS)), max_size=4), max_size=3))
@example([[("filename*", "x"), ("filename*0", "x"), ("name", "file")]])
def test_any_form_is_accepted_or_refused(parts):
    heads = ["; ".join(f'{name}="{text}"' for name, text in part) for part in parts]
    for kind in (FORM["content-type"], *(f"multipart/form-data; {head}" for head in heads)):
        with suppress(InvalidRequest):
            upload = parse_form(kind, form(b'name="purpose"', *(head.encode() for head in heads)))
            assert upload.data == b"batch" and upload.fields["purpose"] == "batch" and upload.filename.encode()


@pytest.mark.parametrize(
    "query",
    [
        "after=%00",
        "after=%ED%A0%80",
        "limit=1e3",
        "limit=-1",
        "limit=" + "9" * 5000,
        "order=up",
        "x=1",
        "limit=1&limit=x",
    ],
)
@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", f"/v1/responses/resp_{0:048x}/input_items"])
async def test_malformed_queries_are_refused(query, path):
    async with serving() as http:
        assert (await http.get(f"{path}?{query}")).status_code in (400, 404)


def test_too_many_blank_lines_are_refused(monkeypatch):
    monkeypatch.setattr("kvasir.serve.records.batches.lines.MAX_BLANK", 5)
    monkeypatch.setattr("kvasir.serve.records.batches.lines.MAX_LINES", 2)
    good = b'{"custom_id":"a%d","method":"POST","url":"/v1/chat/completions","body":{}}\n'
    for data, fine in ((b"\n" * 5 + good % 1, True), (b"\n" * 8, False), (good % 1 + good % 2 + b"\n" * 5, True),
                       (good % 1 + good % 2 + good % 3, False)):  # fmt: skip
        _, errors = read_tasks(data, CHAT, ServeSettings())
        assert [error["code"] for error in errors] == ([] if fine else ["too_many_tasks"])


async def test_contents_without_a_record_are_removed(tmp_path, monkeypatch):
    async with serving(tmp_path / "data") as http:
        put, contents = Records.put, [*(tmp_path / "data").rglob("file-contents")]

        async def full(self, owner, id, data, *rest):
            if data != b"batch":
                assert [*contents[0].rglob("*_*")], "the bytes were there"
                raise OSError(28, "No space left on device")
            await put(self, owner, id, data, *rest)

        monkeypatch.setattr(Records, "put", full)
        body = form(b'name="purpose"', b'name="file"; filename="x"')
        assert (await http.post("/v1/files", content=body, headers=FORM)).status_code == 500
        assert not [*contents[0].rglob("*_*")]


async def test_contents_whose_record_was_lost_are_removed_at_startup(tmp_path):
    async with serving(tmp_path / "data") as http:
        ids = [(await upload(http, b"x"))["id"] for _ in range(3)]
    (lost,) = (tmp_path / "data" / "files").rglob(f"{ids[1]}.json")
    lost.unlink()
    async with serving(tmp_path / "data") as http:
        left = {file.stem for file in (tmp_path / "data" / "file-contents").rglob("file_*.json")}
        assert left == {ids[0], ids[2]} == {file["id"] for file in (await http.get("/v1/files")).json()["data"]}


def test_a_partly_written_entry_is_ignored(tmp_path, monkeypatch):
    journal, write = BatchJournal(tmp_path / "j.jsonl"), os.write
    journal.open()
    entries = [answered(LineTask(i, "c", b"{}"), 400, b"{}", "r") for i in range(2)]

    def full(file, data):
        monkeypatch.setattr(os, "write", raises)
        return write(file, data[:10])

    def raises(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        journal.add(entries[0])
    monkeypatch.setattr(os, "write", write)
    journal.add(entries[1])
    assert journal.entries() == entries[1:]
    journal.close()


def test_a_journal_damaged_by_a_failing_disk_is_truncated(tmp_path):
    path, entries = tmp_path / "j.jsonl", [answered(LineTask(i, "c", b"{}"), 400, b"{}", "r") for i in range(3)]
    journal = BatchJournal(path)
    journal.open()
    for entry in entries:
        journal.add(entry)
    journal.close()
    first, second, third = path.read_bytes().splitlines(keepends=True)
    for damaged in (bytes(len(second)), b"\xff" + second[1:], second[:5] + b"\n", b"\n", b"[]\n"):
        path.write_bytes(first + damaged + third)
        journal = BatchJournal(path)
        journal.open()
        assert journal.entries() == entries[:1]
        journal.add(entries[2])
        assert journal.entries() == [entries[0], entries[2]]
        journal.close()


@pytest.mark.parametrize("damage", [b"", b"\x00" * 50, b"[1]", b'{"id": '])
async def test_damaged_records_are_skipped_and_the_server_starts(tmp_path, damage):
    async with serving(tmp_path / "data") as http:
        batches = [await until(http, await start(http, [line("a")]), "completed") for _ in range(2)]
        asked = {"input": "hello", "max_output_tokens": 2}
        responses = [(await http.post("/v1/responses", json=asked)).json() for _ in range(2)]
    places = {"batches": batches[0]["id"], "files": batches[0]["input_file_id"], "responses": responses[0]["id"]}
    for kind, id in places.items():
        (path,) = (tmp_path / "data" / kind).rglob(f"{id}.json")
        path.write_bytes(damage)
    async with serving(tmp_path / "data") as http:
        for kind, id in places.items():
            assert (await http.get(f"/v1/{kind}/{id}")).status_code == 404
        gone = await http.post("/v1/responses", json=asked | {"previous_response_id": responses[0]["id"]})
        assert gone.status_code == 404
        assert [batch["id"] for batch in (await http.get("/v1/batches")).json()["data"]] == [batches[1]["id"]]
        assert len((await http.get("/v1/files")).json()["data"]) == 3
        assert (await http.get(f"/v1/responses/{responses[1]['id']}")).status_code == 200
        await http.app.state.batches.sweep()
        await until(http, await start(http, [line("a")]), "completed")


async def test_an_interrupted_write_is_still_tracked(tmp_path):
    """Else it would take room on the disk that no share counts."""
    records = Records(tmp_path / "r", max_count=9, max_bytes=99, max_age=99)
    for _ in range(20):
        task = asyncio.ensure_future(records.put("ann", new_id("x"), json.dumps({}).encode()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))
    await records.put("ann", new_id("x"), b"{}")
    files = {file.stem for file in (tmp_path / "r").rglob("x_*.json")}
    assert files == {id for _, id in records.ids} and len(files) == 9
    records.close()


# -- batches -------------------------------------------------------------------------------------------------


async def many(http, file: dict, count: int, headers=None) -> list[dict]:
    asked = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    answers = [await http.post("/v1/batches", json=asked, headers=headers) for _ in range(count)]
    return [answer.json() for answer in answers]


async def test_few_batches_of_a_key_are_in_memory_and_none_waits_for_another_keys():
    async with serving(front=make_front(step_seconds=0.002), keys=(ANN, BOB), batch_width=4) as http:
        file = await upload(http, [line(f"c{i}", max_tokens=60) for i in range(8)], AS_ANN)
        batches = await many(http, file, 12, AS_ANN)
        other = await start(http, [line("x")], headers=AS_BOB)
        other = await until(http, other, "completed", headers=AS_BOB)
        runs = http.app.state.batches.unfinished
        own = [run for run in runs.values() if run.owner == "ann"]
        assert 0 < sum(run.begun for run in own) <= 2 < len(own)
        for batch in batches[2:]:
            path = f"/v1/batches/{batch['id']}"
            ended = (await http.post(f"{path}/cancel", headers=AS_ANN)).json()
            assert ended["status"] in ("cancelled", "cancelling", "completed")
            if ended["status"] == "cancelled":  # those that had not begun: at once
                assert (await http.get(path, headers=AS_ANN)).json() == ended and ended["output_file_id"] is None
        for batch in batches[:2]:
            ended = await until(http, batch, "completed", headers=AS_ANN)
            assert len(await lines_of(http, ended["output_file_id"], AS_ANN)) == 8
        for batch in batches[2:]:
            await until(http, batch, "cancelled", headers=AS_ANN)
        async with asyncio.timeout(20):
            while runs:
                await asyncio.sleep(0.01)


async def test_waiting_batches_survive_shutdown(tmp_path):
    async with serving(tmp_path / "data", make_front(step_seconds=0.005)) as http:
        file = await upload(http, [line(f"c{i}", max_tokens=60) for i in range(3)])
        batches = await many(http, file, 5)
    async with serving(tmp_path / "data") as http:
        for batch in batches:
            ended = await until(http, batch, "completed")
            assert len(await lines_of(http, ended["output_file_id"])) == 3


async def test_requests_during_shutdown_are_done_by_the_next_server(tmp_path):
    async with serving(tmp_path / "data") as http:
        file = await upload(http, [line("a")])
        await http.app.state.batches.stop()
        (batch,) = await many(http, file, 1)
        assert batch["status"] == "validating" and not http.app.state.batches.unfinished
    async with serving(tmp_path / "data") as http:
        assert (await until(http, batch, "completed"))["request_counts"]["completed"] == 1


async def test_answers_do_not_fill_the_disk_beyond_a_share(tmp_path):
    async with serving(tmp_path / "data", file_bytes=3000, max_file=2500) as http:
        bad = [{"custom_id": f"{i}", "method": "POST", "url": CHAT, "body": {}} for i in range(15)]
        file = await upload(http, bad)
        batches = await many(http, file, 10)
        for batch in batches:
            if "id" in batch:
                await until(http, batch, "completed", "failed")
        sizes = [file["bytes"] for file in (await http.get("/v1/files")).json()["data"]]
        assert len(sizes) <= 4, "the input, one answer more than there is room for, and one that ran beside it"
        (refused,) = await many(http, file, 1)
        assert "delete some" in refused["error"]["message"]


async def test_removing_a_key_ends_its_batches():
    async with serving(front=make_front(step_seconds=0.002), keys=(ANN, BOB), batch_width=2) as http:
        batch = await start(http, [line(f"c{i}", max_tokens=40) for i in range(500)], headers=AS_ANN)
        batch = await until(http, batch, "in_progress", headers=AS_ANN)
        run = http.app.state.batches.unfinished[batch["id"]]
        http.app.state.ring.take((BOB,))
        async with asyncio.timeout(20):
            while batch["id"] in http.app.state.batches.unfinished:
                await asyncio.sleep(0.01)
        assert run.batch["status"] == "failed" and "key" in run.batch["errors"]["data"][0]["message"]
        assert run.batch["request_counts"]["completed"] < 500
