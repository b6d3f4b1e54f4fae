"""Files and batches: what is uploaded, what is wrong with it, and what becomes of its lines."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import asynccontextmanager

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.errors import InvalidRequest
from kvasir.serve.auth.keys import Key, KeyLimits
from kvasir.serve.records.batches.call import Caller
from kvasir.serve.records.batches.files import Files
from kvasir.serve.records.batches.lines import BatchEntry, BatchJournal, LineTask, answered, read_tasks, to_jsonl
from kvasir.serve.records.batches.upload import parse_form
from kvasir.serve.settings import ServeSettings
from kvasir.types import ServiceClass
from tests.examples import examples
from tests.later import openai
from tests.serve.fakes import POISON
from tests.serve.running import client, live, make_front

ANN, BOB = Key("ann-secret", "ann"), Key("bob-secret", "bob")
AS_ANN, AS_BOB = ({"Authorization": f"Bearer {key.secret}"} for key in (ANN, BOB))
CHAT = "/v1/chat/completions"


@asynccontextmanager
async def serving(folder=None, front=None, **fields):
    async with client(ServeSettings(data_dir=folder, **fields), front or make_front()) as http:
        await http.app.state.batches.start()
        yield http
        await http.app.state.batches.stop()
        http.app.state.batches.close()
        http.app.state.responses.close()


def line(id: str, url: str = CHAT, **body) -> dict:
    body = {"messages": [{"role": "user", "content": id}], "temperature": 0, "max_tokens": 5} | body
    return {"custom_id": id, "method": "POST", "url": url, "body": body}


async def upload(http, lines, headers=None, **form) -> dict:
    data = lines if isinstance(lines, bytes) else "\n".join(map(json.dumps, lines)).encode()
    fields = {"purpose": "batch"} | form
    answer = await http.post("/v1/files", files={"file": ("in.jsonl", data)}, data=fields, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def start(http, lines, endpoint: str = CHAT, headers=None, **fields) -> dict:
    file = await upload(http, lines, headers)
    asked = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"} | fields
    answer = await http.post("/v1/batches", json=asked, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def until(http, batch: dict, *statuses: str, headers=None) -> dict:
    async with asyncio.timeout(20):
        while batch["status"] not in statuses:
            await asyncio.sleep(0.01)
            batch = (await http.get(f"/v1/batches/{batch['id']}", headers=headers)).json()
    return batch


async def lines_of(http, id: str | None, headers=None) -> list[dict]:
    if id is None:
        return []
    answer = await http.get(f"/v1/files/{id}/content", headers=headers)
    assert answer.headers["content-type"] == "application/octet-stream"
    return [json.loads(text) for text in answer.text.splitlines()]


# -- the pieces ----------------------------------------------------------------------------------------------


@given(
    st.binary(max_size=300),
    st.text(min_size=1, max_size=20),
    st.dictionaries(st.sampled_from("abc"), st.text(max_size=9)),
)
def test_a_form_is_read_as_it_was_written(data, filename, fields):
    request = httpx.Request("POST", "http://x", files={"file": (filename, data)}, data=fields)
    upload = parse_form(request.headers["content-type"], request.read())
    assert (upload.data, upload.fields) == (data, fields)


@examples(200)
@given(st.binary(max_size=200), st.sampled_from(["multipart/form-data; boundary=x", "multipart/form-data", "a/b", "é"]))
def test_a_malformed_form_is_refused(data, kind):
    with pytest.raises(InvalidRequest):
        parse_form(kind, data)
    for wrong in (b"--x\r\n" + data + b"\r\n--x--", b"--x\r\nContent-Disposition: form-data\r\n\r\n1\r\n--x--"):
        with pytest.raises(InvalidRequest):
            parse_form("multipart/form-data; boundary=x", wrong)


BAD: list[tuple[Callable[[], bytes] | bytes, str, int | None]] = [
    (b"", "empty_file", None),
    (b"\n \n", "empty_file", None),
    (b"{", "invalid_json_line", 1),
    (b'\n{"a": ' + b"[" * 100, "invalid_json_line", 2),
    (b"[]", "invalid_request", 1),
    (b'{"custom_id": "a"}', "invalid_request", 1),
    (json.dumps(line("a") | {"extra": 1}).encode(), "invalid_request", 1),
    (json.dumps(line("a") | {"method": "GET"}).encode(), "invalid_request", 1),
    (json.dumps(line("a") | {"custom_id": 5}).encode(), "invalid_request", 1),
    (json.dumps(line("a", url="/v1/embeddings")).encode(), "mismatched_url", 1),
    (json.dumps(line("a", stream=True)).encode(), "invalid_request", 1),
    (b"\n".join([json.dumps(line("a")).encode()] * 2), "duplicate_custom_id", 2),
    (lambda: b"\n".join(json.dumps(line(str(i))).encode() for i in range(50_001)), "too_many_tasks", 50_001),
    (lambda: b'"' + b"x" * (16 << 20) + b'"', "line_too_long", 1),
]  # fmt: skip


@pytest.mark.parametrize(("data", "code", "number"), BAD, ids=[f"{code}-{n}" for _, code, n in BAD])
def test_an_error_in_a_file_states_its_line(data, code, number):
    _, errors = read_tasks(data() if callable(data) else data, CHAT, ServeSettings())
    assert (errors[0]["code"], errors[0]["line"]) == (code, number) and errors[0]["message"]


def test_a_torn_journal_keeps_its_complete_entries(tmp_path):
    path = tmp_path / "deep" / "journal.jsonl"
    body = b'{"usage":{"prompt_tokens":3,"completion_tokens":2},"x":0.1}'
    entries = [answered(LineTask(i, f"c{i}", b"{}"), 200 if i % 2 else 400, body, f"r{i}") for i in range(5)]
    journal = BatchJournal(path)
    journal.open()
    for entry in entries[:4]:
        journal.add(entry)
    journal.close()
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        journal = BatchJournal(path)
        journal.open()
        found = journal.entries()
        assert found == entries[: len(found)] and len(found) == whole[:cut].count(b"\n")
        journal.add(entries[4])
        assert journal.entries() == [*found, entries[4]]
        journal.close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [json.loads(x)["custom_id"] for x in to_jsonl(reversed(entries)).splitlines()] == [f"c{i}" for i in range(5)]
    assert [entry.usage for entry in entries[:2]] == [(0, 0, 0, 0), (3, 0, 2, 0)]
    assert isinstance(entries[0], BatchEntry)


# -- files ---------------------------------------------------------------------------------------------------


async def test_a_file_comes_back_as_it_was_sent_to_its_key_alone(tmp_path):
    async with serving(tmp_path / "data", keys=(ANN, BOB)) as http:
        data = bytes(range(256)) * 10
        file = await upload(http, data, AS_ANN)
        assert (file["bytes"], file["filename"], file["purpose"]) == (2560, "in.jsonl", "batch")
        content = await http.get(f"/v1/files/{file['id']}/content", headers=AS_ANN)
        assert content.content == data
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            assert (await http.request(method, f"/v1/files/{file['id']}{path}", headers=AS_BOB)).status_code == 404
        assert (await http.get("/v1/files", headers=AS_BOB)).json()["data"] == []
        assert (await http.get("/v1/files", headers=AS_ANN)).json()["data"] == [file]
        asked = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        assert (await http.post("/v1/batches", json=asked, headers=AS_BOB)).status_code == 404
    async with serving(tmp_path / "data", keys=(ANN,)) as http:
        assert (await http.get(f"/v1/files/{file['id']}", headers=AS_ANN)).json() == file
        assert (await http.delete(f"/v1/files/{file['id']}", headers=AS_ANN)).json()["deleted"]
        assert (await http.get(f"/v1/files/{file['id']}/content", headers=AS_ANN)).status_code == 404
        assert not list((tmp_path / "data").rglob("file_*"))


async def test_files_are_bounded():
    async with serving(file_count=2, file_bytes=1000, max_file=600) as http:
        over = await http.post("/v1/files", files={"file": ("x", b"x" * 601)}, data={"purpose": "batch"})
        assert over.status_code == 413
        far_over = await http.post("/v1/files", files={"file": ("x", b"x" * 70_000)}, data={"purpose": "batch"})
        assert far_over.status_code == 413
        await upload(http, b"x" * 600)
        full = await http.post("/v1/files", files={"file": ("x", b"x" * 600)}, data={"purpose": "batch"})
        assert full.status_code == 429 and "delete" in full.json()["error"]["message"]
        await upload(http, b"x")
        full = await http.post("/v1/files", files={"file": ("x", b"x")}, data={"purpose": "batch"})
        assert full.status_code == 429


async def test_uploads_of_a_key_take_turns_and_a_slow_one_loses_its_turn():
    async with serving(body_time=0.02, keys=(ANN, BOB)) as http:

        async def never():
            yield b"--x\r\n"
            await asyncio.sleep(60)

        slow = {"content-type": "multipart/form-data; boundary=x", **AS_ANN}
        waiting = [asyncio.ensure_future(http.post("/v1/files", content=never(), headers=slow)) for _ in range(4)]
        await upload(http, b"x", AS_BOB)
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [408] * 4
        await upload(http, b"x", AS_ANN)


async def test_files_expire_and_come_in_pages(monkeypatch):
    async with serving() as http:
        form = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        short = await upload(http, b"1", **form)
        files = [short, *[await upload(http, str(i).encode()) for i in range(4)]]
        assert short["expires_at"] == short["created_at"] + 3600
        ids, after = [], ""
        while True:
            page = (await http.get(f"/v1/files?limit=2&order=asc{after}")).json()
            ids += [file["id"] for file in page["data"]]
            if not page["has_more"]:
                break
            after = f"&after={page['last_id']}"
        assert sorted(ids) == sorted(file["id"] for file in files)
        assert (await http.get("/v1/files?purpose=vision")).json()["data"] == []
        now = time.time()
        monkeypatch.setattr("kvasir.serve.records.batches.files.time.time", lambda: now + 3601)
        assert (await http.get(f"/v1/files/{short['id']}")).status_code == 404
        assert len((await http.get("/v1/files")).json()["data"]) == 4


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({}, "purpose"),
        ({"purpose": "vision"}, "purpose"),
        ({"purpose": "batch", "extra": "1"}, "extra"),
        ({"purpose": "batch", "expires_after[seconds]": "5"}, "expires_after[seconds]"),
        ({"purpose": "batch", "expires_after[anchor]": "now"}, "expires_after[anchor]"),
    ],
)
async def test_a_form_that_is_wrong_is_refused_by_name(form, param):
    async with serving() as http:
        answer = await http.post("/v1/files", files={"file": ("x", b"x")}, data=form)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
        assert (await http.post("/v1/files", json=form)).status_code == 400
        assert (await http.post("/v1/files", files={"other": b"x"}, data=form)).status_code == 400


# -- batches -------------------------------------------------------------------------------------------------

ENDPOINTS = {
    CHAT: {},
    "/v1/completions": {"messages": None, "prompt": "ab"},
    "/v1/responses": {"messages": None, "input": "ab", "max_tokens": None, "max_output_tokens": 5},
    "/v1/embeddings": {"messages": None, "input": "ab", "max_tokens": None, "temperature": None},
}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("on_disk", [False, True])
async def test_a_line_gets_the_response_of_its_route(endpoint, on_disk, tmp_path):
    async with serving(tmp_path / "data" if on_disk else None) as http:
        task = line("a", endpoint, **ENDPOINTS[endpoint])
        task["body"] = {k: v for k, v in task["body"].items() if v is not None}
        bad = {**task, "custom_id": "b", "body": task["body"] | {"unknown": 1}}
        batch = await until(http, await start(http, [task, bad], endpoint, metadata={"k": "v"}), "completed")
        assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        assert batch["metadata"] == {"k": "v"} and batch["completed_at"] >= batch["in_progress_at"]
        (good,) = await lines_of(http, batch["output_file_id"])
        (wrong,) = await lines_of(http, batch["error_file_id"])
        assert (good["custom_id"], good["error"], good["response"]["status_code"]) == ("a", None, 200)
        assert wrong["response"]["status_code"] == 400
        assert wrong["response"]["body"]["error"]["param"] == "unknown"
        direct = (await http.post(endpoint, json=task["body"])).json()
        for name in ("choices", "data"):
            assert good["response"]["body"].get(name) == direct.get(name)
        tokens = direct["usage"].get("prompt_tokens", direct["usage"].get("input_tokens"))
        assert batch["usage"]["input_tokens"] == tokens
        if on_disk:
            async with asyncio.timeout(60):  # the batch is reported as complete first
                while list((tmp_path / "data" / "batch-lines").iterdir()):
                    await asyncio.sleep(0.01)


async def test_results_keep_the_order_of_lines_and_failures_are_separate():
    front = make_front(max_waiting=2)  # too few for all lines at once: those that are turned away come again
    async with serving(front=front, batch_width=24) as http:
        tasks = [line(f"c{i}", max_tokens=3 + i % 5) for i in range(60)]
        tasks[7] = line("c7", messages=[{"role": "user", "content": "x" * 600}])
        tasks[9] = {"custom_id": "c9", "method": "POST", "url": CHAT, "body": {"model": "nobody", "messages": []}}
        batch = await until(http, await start(http, tasks), "completed")
        good = await lines_of(http, batch["output_file_id"])
        bad = await lines_of(http, batch["error_file_id"])
        assert [entry["custom_id"] for entry in good] == [f"c{i}" for i in range(60) if i not in (7, 9)]
        assert [(entry["custom_id"], entry["response"]["status_code"]) for entry in bad] == [("c7", 400), ("c9", 400)]
        for i, entry in zip([i for i in range(60) if i not in (7, 9)], good, strict=True):
            assert entry["response"]["body"]["usage"]["completion_tokens"] == 3 + i % 5


async def test_a_line_may_predict_its_answer():
    answer = "user: a\nassistant: "  # what the model echoes
    predicted = {"prediction": {"type": "content", "content": answer}, "speculation": {"method": "ngram"}}
    lines = [line("plain"), line("a", max_tokens=len(answer), **predicted)]
    async with serving(front=make_front(drafts=True)) as http:
        batch = await until(http, await start(http, lines), "completed")
        plain, found = [one["response"]["body"] for one in await lines_of(http, batch["output_file_id"])]
    assert "completion_tokens_details" not in plain["usage"]
    assert found["choices"][0]["message"]["content"] == answer
    assert found["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 10


async def test_a_failing_engine_fails_its_lines_alone():
    async with serving() as http:
        poison = {"prompt": POISON, "max_tokens": 5}
        tasks = [{"custom_id": c, "method": "POST", "url": "/v1/completions", "body": body}
                 for c, body in (("bad", poison), ("good", {"prompt": "ab", "max_tokens": 2}))]  # fmt: skip
        batch = await until(http, await start(http, tasks, "/v1/completions"), "completed")
        (bad,) = await lines_of(http, batch["error_file_id"])
        assert bad["response"]["status_code"] == 500 and "Secret" not in json.dumps(bad)
        assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}


async def test_a_bad_file_fails_its_batch():
    async with serving() as http:
        batch = await until(http, await start(http, b"{\n"), "failed")
        assert batch["errors"]["data"][0]["line"] == 1 and batch["failed_at"]
        assert (await http.post(f"/v1/batches/{batch['id']}/cancel")).status_code == 400


async def test_a_cancelled_batch_keeps_its_finished_lines():
    async with serving(front=make_front(step_seconds=0.002), batch_width=4) as http:
        batch = await start(http, [line(f"c{i}", max_tokens=40) for i in range(50)])
        async with asyncio.timeout(20):
            while not batch["request_counts"]["completed"]:
                await asyncio.sleep(0.01)
                batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
        in_use = await http.delete(f"/v1/files/{batch['input_file_id']}")
        assert in_use.status_code == 400 and "cancel" in in_use.json()["error"]["message"]
        assert (await http.post(f"/v1/batches/{batch['id']}/cancel")).json()["status"] == "cancelling"
        batch = await until(http, batch, "cancelled")
        good = await lines_of(http, batch["output_file_id"])
        bad = await lines_of(http, batch["error_file_id"])
        assert 0 < len(good) < 50 and len(good) + len(bad) == 50
        assert {entry["error"]["code"] for entry in bad} == {"batch_cancelled"}
        assert (await http.post(f"/v1/batches/{batch['id']}/cancel")).json() == batch
        assert (await http.delete(f"/v1/files/{batch['input_file_id']}")).status_code == 200


async def test_a_batch_whose_window_is_over_expires(monkeypatch):
    monkeypatch.setattr("kvasir.serve.records.batches.kept.WINDOW", 1)
    async with serving(front=make_front(step_seconds=0.02)) as http:
        batch = await until(http, await start(http, [line(f"c{i}", max_tokens=400) for i in range(3)]), "expired")
        bad = await lines_of(http, batch["error_file_id"])
        assert [entry["error"]["code"] for entry in bad] == ["batch_expired"] * 3 and batch["expired_at"]


async def test_a_batch_continues_after_a_restart_and_runs_no_line_twice(tmp_path, monkeypatch):
    """The server ends in the midst, thrice; what is in the journal by then is not asked again."""
    asked: list[str] = []

    post = Caller.post

    async def noted(self, path, body, key, id):
        answer = await post(self, path, body, key, id)
        asked.append(json.loads(body)["messages"][0]["content"])
        return answer

    monkeypatch.setattr(Caller, "post", noted)
    names = [f"c{i}" for i in range(40)]
    async with serving(tmp_path / "data", make_front(step_seconds=0.001), batch_width=4) as http:
        batch = await start(http, [line(name, max_tokens=20) for name in names])
        while len(asked) < 5:
            await asyncio.sleep(0.005)
    for enough in (12, 20):
        async with serving(tmp_path / "data", make_front(step_seconds=0.001), batch_width=4) as http:
            while len(asked) < enough:
                await asyncio.sleep(0.005)
    async with serving(tmp_path / "data", batch_width=4) as http:
        batch = await until(http, {**batch, "status": ""}, "completed")
        good = await lines_of(http, batch["output_file_id"])
        assert [entry["custom_id"] for entry in good] == names and batch["request_counts"]["completed"] == 40
        assert sorted(asked) == sorted(names)
        for entry in good[:3]:
            direct = await http.post(CHAT, json=line(entry["custom_id"], max_tokens=20)["body"])
            assert entry["response"]["body"]["choices"] == direct.json()["choices"]
    async with serving(tmp_path / "data") as http:
        assert (await http.get(f"/v1/batches/{batch['id']}")).json() == batch


async def test_a_full_disk_is_waited_for(tmp_path, monkeypatch):
    """Some writes of a batch fail; the batch continues when there is room again."""
    monkeypatch.setattr("kvasir.serve.records.batches.work.RETRY_SECONDS", 0.01)
    adds, puts = (iter([False, False, True, False, True]), iter([True]))
    add, put = BatchJournal.add, Files.put

    def full(failing) -> None:
        if next(failing, False):
            raise OSError(28, "No space left on device")

    async def put_later(self, *arguments, **fields):
        full(puts)
        return await put(self, *arguments, **fields)

    monkeypatch.setattr(BatchJournal, "add", lambda self, entry: (full(adds), add(self, entry)))
    async with serving(tmp_path / "data", batch_width=3) as http:
        batch = await start(http, [line(f"c{i}") for i in range(15)])
        monkeypatch.setattr(Files, "put", put_later)
        batch = await until(http, batch, "completed")
        assert [e["custom_id"] for e in await lines_of(http, batch["output_file_id"])] == [f"c{i}" for i in range(15)]
        assert [*adds, *puts] == [], "all faults were met"


async def test_a_batch_has_the_class_limits_and_visibility_of_its_key():
    slow = Key("slow-secret", "slow", ServiceClass.BACKGROUND, limits=KeyLimits(max_class=ServiceClass.BACKGROUND))
    seen = []
    front = make_front()
    submit = front.engine.submit

    def watching(request):
        seen.append((request.tenant, request.slo))
        return submit(request)

    front.engine.submit = watching
    async with serving(front=front, keys=(ANN, BOB, slow)) as http:
        for key in (ANN, slow):
            headers = {"Authorization": f"Bearer {key.secret}"}
            batch = await start(http, [line("a")], headers=headers)
            batch = await until(http, batch, "completed", headers=headers)
            assert (await lines_of(http, batch["output_file_id"], headers))[0]["custom_id"] == "a"
            assert (await http.get(f"/v1/batches/{batch['id']}", headers=AS_BOB)).status_code == 404
            assert (await http.post(f"/v1/batches/{batch['id']}/cancel", headers=AS_BOB)).status_code == 404
            output = await http.get(f"/v1/files/{batch['output_file_id']}", headers=AS_BOB)
            assert output.status_code == 404
        assert (await http.get("/v1/batches", headers=AS_BOB)).json()["data"] == []
    assert seen == [("ann", ServiceClass.BATCH), ("slow", ServiceClass.BACKGROUND)]


async def test_a_batch_of_a_key_that_is_gone_fails(tmp_path):
    async with serving(tmp_path / "data", make_front(step_seconds=0.01), keys=(ANN, BOB)) as http:
        batch = await start(http, [line(f"c{i}", max_tokens=200) for i in range(50)], headers=AS_ANN)
        await until(http, batch, "in_progress", headers=AS_ANN)
    async with serving(tmp_path / "data", keys=(BOB,)) as http:
        async with asyncio.timeout(20):
            while http.app.state.batches.unfinished:
                await asyncio.sleep(0.01)
    async with serving(tmp_path / "data", keys=(ANN, BOB)) as http:
        failed = (await http.get(f"/v1/batches/{batch['id']}", headers=AS_ANN)).json()
        assert failed["status"] == "failed" and "key" in failed["errors"]["data"][0]["message"]


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"endpoint": "/v1/images/edits"}, "endpoint", 400),
        ({"completion_window": "1h"}, "completion_window", 400),
        ({"input_file_id": "file_x"}, "input_file_id", 404),
        ({"input_file_id": f"file_{0:048x}"}, "input_file_id", 404),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds", 400),
        ({"extra": 1}, "extra", 400),
    ],
)
async def test_an_invalid_batch_is_refused_by_name(fields, param, status):
    async with serving() as http:
        file = await upload(http, [line("a")])
        asked = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"} | fields
        answer = await http.post("/v1/batches", json=asked)
        assert answer.status_code == status and answer.json()["error"]["param"] == param
        assert (await http.get("/v1/batches/x")).status_code == 404
        assert (await http.get("/v1/batches?after=x")).status_code == 400


def test_every_route_by_the_client():
    with live() as server:
        api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        data = "\n".join(json.dumps(line(f"c{i}")) for i in range(5)).encode()
        file = api.files.create(file=("x.jsonl", data), purpose="batch")
        assert api.files.retrieve(file.id) == file and api.files.content(file.id).read() == data
        batches = []
        for _ in range(3):
            batch = api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            while batch.status != "completed":
                batch = api.batches.retrieve(batch.id)
            batches.append(batch)
        assert batch.request_counts.completed == 5 and batch.usage.output_tokens == 25
        assert [b.id for b in api.batches.list(limit=2)] and len(list(api.batches.list(limit=2))) == 3
        assert len(api.files.content(batch.output_file_id).text.splitlines()) == 5
        assert len(list(api.files.list(limit=2))) == 4 and len(list(api.files.list(purpose="batch_output"))) == 3
        assert api.files.delete(file.id).deleted
        with pytest.raises(openai.BadRequestError):
            api.batches.cancel(batch.id)
        with pytest.raises(openai.NotFoundError):
            api.files.retrieve(file.id)
