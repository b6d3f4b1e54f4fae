"""The access log and the audit log: their contents, what they must not contain, and that no request waits for a
disk."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kvasir.errors import ConfigError
from kvasir.serve.auth.keys import Key, KeyScope
from kvasir.serve.auth.scopes import needs_management
from kvasir.serve.dialects import DIALECTS, openai
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.responses import json_response
from kvasir.serve.http.wire import Wire
from kvasir.serve.settings import ServeSettings
from kvasir.serve.telemetry.audit import set_outcome
from kvasir.serve.telemetry.lines import LineLog
from tests.serve.running import client, live
from tests.serve.test_server import process

KEYS = (Key("first-key", "ann"), Key("manage-key", "root", scopes=frozenset(KeyScope)))
CHAT = {"messages": [{"role": "user", "content": "hush-hush"}], "max_tokens": 5}


def read(path: Path) -> list[dict]:
    *lines, rest = path.read_text().split("\n")
    return [json.loads(line) for line in lines] if not rest else []


async def until(condition, seconds: float = 60.0):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
    return found


# -- the file ----------------------------------------------------------------------------------------------


def test_lines_come_whole_in_order_and_for_the_owner_alone(tmp_path):
    path = tmp_path / "log"
    for start in (0, 500):
        log = LineLog(path)
        for i in range(start, start + 500):
            log.put({"i": i, "text": "line\nbreak \u2028 é"})
        log.close()
    assert [line["i"] for line in read(path)] == list(range(1000)) and path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_bytes().split(b"\n")) == 1001, "no text of a client's breaks a line"


def test_a_file_that_was_moved_away_is_followed(tmp_path):
    path, old = tmp_path / "log", tmp_path / "log.1"
    log, total = LineLog(path), 0
    for turn in range(5):
        for _ in range(100):
            log.put({"i": total})
            total += 1
        if turn == 2:
            path.rename(old)
            log.reopen()
    log.close()
    before, after = read(old), read(path)
    assert [line["i"] for line in before + after] == list(range(total)) and after


def test_requests_do_not_wait_for_a_slow_disk(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError):
        LineLog(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    log = LineLog(pipe, most=10)
    line = {"text": "x" * 100_000}
    for _ in range(100):
        log.put(line)
    assert log.dropped >= 80
    os.set_blocking(reader, True)
    while os.read(reader, 1 << 20).count(b"\n") == 0:
        pass
    os.close(reader)
    log.close()
    assert log.dropped > 80, "what nobody reads is lost and counted"


def test_a_full_disk_is_logged_once_and_counted(caplog):
    log = LineLog(Path("/dev/full"))
    for i in range(1000):
        log.put({"i": i})
    log.close()
    assert log.dropped == 1000 and caplog.text.count("lines are lost") == 1


@pytest.mark.parametrize("path", ["/dev/null/log", "/"])
def test_an_unusable_log_file_is_refused_at_startup(path):
    with pytest.raises(ConfigError, match="expected a file"):
        LineLog(Path(path))


# -- access ------------------------------------------------------------------------------------------------


async def test_a_line_for_every_request_without_its_texts(tmp_path):
    path = tmp_path / "access"
    headers = {"Authorization": "Bearer first-key", "X-Request-Id": "mine"}
    async with client(ServeSettings(keys=KEYS, access_log=path), headers=headers) as http:
        whole = (await http.post("/v1/chat/completions", json=CHAT | {"n": 2})).json()
        await http.post("/v1/chat/completions", json=CHAT | {"stream": True})
        await http.post("/v1/completions", json={"prompt": ["hush-a", "hush-b"], "max_tokens": 3})
        await http.post("/v1/embeddings", json={"input": "hush-c"})
        await http.post("/v1/completions", json={"prompt": "hush-d", "hush-e": 1})
        await http.get("/hush-f?hush-g")
        await http.get("/v1/models", headers={"Authorization": "Bearer hush-hush", "X-Request-Id": "hush hush"})
        lines = await until(lambda: found if len(found := read(path)) == 7 else None)
        chat, stream, two, embedded, bad, unknown, stranger = lines
    assert "hush" not in path.read_text() and "first-key" not in path.read_text()
    for line in lines[:-1]:
        assert (line["request_id"], line["key"], line["client"]) == ("mine", "ann", "127.0.0.1")
        assert line["time"].endswith("Z") and line["seconds"] >= 0
    assert (chat["route"], chat["method"], chat["status"]) == ("/v1/chat/completions", "POST", 200)
    assert chat["model"] == "fake" and chat["finish_reasons"] == {"length": 2}
    usage = whole["usage"]
    assert (chat["prompt_tokens"], chat["answer_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert stream["answer_tokens"] == 5 and stream["finish_reasons"] == {"length": 1}
    assert 0 < stream["cached_tokens"] < stream["prompt_tokens"] == chat["prompt_tokens"]
    assert (two["prompt_tokens"], two["answer_tokens"], two["finish_reasons"]) == (12, 6, {"length": 2})
    assert (embedded["prompt_tokens"], embedded["answer_tokens"]) == (6, 0)
    assert bad["status"] == 400 and "model" not in bad
    assert (unknown["route"], unknown["status"]) == ("other", 404)
    assert stranger["route"] == "/v1/models", "what is refused on its way has its route, too"
    assert (stranger["status"], stranger["key"]) == (401, None) and len(stranger["request_id"]) == 24


def test_a_disconnected_client_has_a_log_line(tmp_path):
    path = tmp_path / "access"
    with live(ServeSettings(port=0, access_log=path), step_seconds=0.02) as server:
        body = {"prompt": "ab", "max_tokens": 400, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            next(response.iter_lines())
        asyncio.run(until(lambda: read(path)))
    line = read(path)[0]
    assert line["status"] == 200 and line["finish_reasons"] == {"abort": 1} and 0 < line["answer_tokens"] < 400


@pytest.mark.slow
def test_a_log_is_rotated_by_its_name_and_a_hangup(tmp_path):
    path, old = tmp_path / "access", tmp_path / "access.1"
    with process({"access_log": str(path)}, {}) as (server, url):
        httpx.get(f"{url}/version")
        asyncio.run(until(lambda: any(line["route"] == "/version" for line in read(path))))
        path.rename(old)
        server.send_signal(signal.SIGHUP)

        def followed() -> bool:
            httpx.get(f"{url}/kvasir/info")
            return path.exists() and bool(read(path))

        asyncio.run(until(followed))
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
    assert {line["route"] for line in read(path)} == {"/kvasir/info"}
    assert path.read_bytes().endswith(b"\n"), "the last line is there when the server has ended"


# -- audit -------------------------------------------------------------------------------------------------

router = APIRouter(route_class=JsonRoute, tags=["management"])
plain = APIRouter(route_class=JsonRoute)


class Thing(Wire):
    name: str
    secret: str = ""


@router.post("/manage/things")
async def make(wire: Thing) -> Response:
    if wire.name == "broken":
        raise RuntimeError("it is")
    return json_response({})


@router.delete("/manage/things/{digest}")
async def remove(digest: str) -> Response:
    return json_response({})


@plain.post("/maybe")
async def maybe(wire: Thing, request: Request) -> Response:
    if wire.name == "new":
        needs_management(request)
    return json_response({})


@router.post("/manage/pull")
async def pull(wire: Thing, request: Request) -> Response:
    async def events():
        yield b"{}\n"
        set_outcome(request, "failed: no such file")
        yield b'{"error": "no such file"}\n'

    return StreamingResponse(events())


async def test_the_audit_log_has_the_key_the_action_its_object_and_its_result(tmp_path, monkeypatch):
    added = replace(openai.DIALECT, routers=(*openai.DIALECT.routers, router, plain))
    monkeypatch.setattr("kvasir.serve.app.DIALECTS", (*DIALECTS[:-1], added))
    path = tmp_path / "data" / "audit.jsonl"
    root, ann = ({"Authorization": f"Bearer {k}"} for k in ("manage-key", "first-key"))
    async with client(ServeSettings(keys=KEYS, data_dir=tmp_path / "data")) as http:
        thing = {"name": "new", "secret": "hush-hush"}
        await http.post("/manage/things", json=thing, headers=root)
        await http.post("/manage/things", json=thing, headers=ann)
        await http.post("/manage/things", content=b"hush", headers=root)
        await http.post("/manage/things", json={"name": "broken"}, headers=root)
        await http.post("/manage/things", json={"name": 5}, headers=root)
        await http.delete("/manage/things/sha256:abc", headers=root)
        await http.post("/manage/pull", json={"name": "x" * 1000}, headers=root)
        await http.post("/v1/chat/completions", json=CHAT, headers=root)
        await http.post("/maybe", json={"name": "old"}, headers=ann)
        await http.post("/maybe", json={"name": "new"}, headers=ann)
        await http.post("/manage/things", json=thing)
        await http.post("/manage/things", json=thing, headers={"Authorization": "Bearer hush-key"})
        await http.delete("/manage/things/x", headers=root | {"Origin": "https://hostile.example"})
        await http.delete("/manage/things/x", headers=root | {"Host": "hostile.example"})
        await http.post("/v1/chat/completions", json=CHAT)
        lines = await until(lambda: found if len(found := read(path)) == 12 else None)
    assert "hush" not in path.read_text()
    assert [(line["key"], line["status"], line["outcome"]) for line in lines] == [
        ("root", 200, "done"),
        ("ann", 403, "refused"),
        ("root", 400, "refused"),
        ("root", 500, "failed"),
        ("root", 400, "refused"),
        ("root", 200, "done"),
        ("root", 200, "failed: no such file"),
        ("ann", 403, "refused"),
        (None, 401, "refused"),
        (None, 401, "refused"),
        (None, 403, "refused"),
        (None, 403, "refused"),
    ]
    assert all(line["request_id"] and line["client"] for line in lines)
    targets = [
        {"name": "new"},
        {},
        {},
        {"name": "broken"},
        {},
        {"digest": "sha256:abc"},
        {"name": "x" * 256},
        {"name": "new"},
    ]
    assert [line["target"] for line in lines] == [*targets, {}, {}, {}, {}]
    assert lines[5]["route"] == "/manage/things/{digest}" and lines[5]["method"] == "DELETE"
