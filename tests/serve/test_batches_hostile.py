"""Files and batches under clients that mean harm: nothing stays behind, and nobody takes more than a share."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvasir.errors import InvalidRequest
from kvasir.serve.batches.lines import read_tasks
from kvasir.serve.batches.upload import parse_form
from kvasir.serve.records import Records, new_id
from kvasir.serve.settings import ServeSettings
from tests.serve.test_batches import CHAT, serving

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
async def test_a_name_that_is_no_text_is_refused_and_leaves_nothing(name):
    async with serving() as http:
        body = form(b'name="purpose"', b'name="file"; filename*=' + name)
        answer = await http.post("/v1/files", content=body, headers=FORM)
        assert answer.status_code == 400 and "malformed" in answer.json()["error"]["message"]
        assert await http.app.state.batches.files._contents.all() == []


@settings(max_examples=300)
@given(st.lists(st.lists(st.tuples(st.sampled_from(HEADS), st.sampled_from(TEXTS)), max_size=4), max_size=3))
@example([[("filename*", "x"), ("filename*0", "x"), ("name", "file")]])
def test_any_form_is_taken_or_refused(parts):
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
async def test_queries_that_are_wrong(query, path):
    async with serving() as http:
        assert (await http.get(f"{path}?{query}")).status_code in (400, 404)


def test_lines_that_say_nothing_end(monkeypatch):
    monkeypatch.setattr("kvasir.serve.batches.lines.MAX_BLANK", 5)
    monkeypatch.setattr("kvasir.serve.batches.lines.MAX_LINES", 2)
    good = b'{"custom_id":"a%d","method":"POST","url":"/v1/chat/completions","body":{}}\n'
    for data, fine in ((b"\n" * 5 + good % 1, True), (b"\n" * 8, False), (good % 1 + good % 2 + b"\n" * 5, True),
                       (good % 1 + good % 2 + good % 3, False)):  # fmt: skip
        _, errors = read_tasks(data, CHAT, ServeSettings())
        assert [error["code"] for error in errors] == ([] if fine else ["too_many_tasks"])


async def test_bytes_without_facts_are_not_kept(monkeypatch):
    async with serving() as http:
        files = http.app.state.batches.files

        async def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(files._facts, "put", full)
        body = form(b'name="purpose"', b'name="file"; filename="x"')
        assert (await http.post("/v1/files", content=body, headers=FORM)).status_code == 500
        assert await files._contents.all() == []


async def test_a_write_that_is_broken_off_is_known_all_the_same(tmp_path):
    """Else it would take room on the disk that no share counts."""
    records = Records(tmp_path / "r", max_count=9, max_bytes=99, max_age=99)
    for _ in range(20):
        task = asyncio.ensure_future(records.put("ann", new_id("x"), json.dumps({}).encode()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))
    await records.put("ann", new_id("x"), b"{}")
    files = {file.stem for file in (tmp_path / "r").rglob("x_*.json")}
    assert files == {id for entries in records._index.values() for id in entries} and len(files) == 9
    records.close()
