"""The page's files and its data: headers, access without a key, and the contents of snapshots by key."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.engine.front import Front
from kvasir.errors import EngineDead, InvalidRequest
from kvasir.metrics import Form
from kvasir.serve.auth.keys import Key
from kvasir.serve.dialects.openai.wire import ChatRequest
from kvasir.serve.hosting.lookout import Lookout
from kvasir.serve.page.live import percentiles
from kvasir.serve.page.static import FILES
from kvasir.serve.settings import ServeSettings
from kvasir.types import SamplingParams
from tests.serve.fakes import EchoEngine, byte_tokenizer, template
from tests.serve.running import client

POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "font-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
TYPES = {
    **{"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"},
    **{"svg": "image/svg+xml; charset=utf-8", "woff2": "font/woff2"},
}


@pytest.mark.parametrize("page", [True, False])
async def test_the_root_answers_without_a_key_with_or_without_the_page(page):
    async with client(ServeSettings(api_keys=("first-key",), page=page)) as http:
        root, docs, head = await http.get("/"), await http.get("/docs"), await http.head("/")
    assert root.status_code == head.status_code == 200 and head.content == b""
    assert ("html" in root.headers["content-type"]) is page and docs.status_code == (200 if page else 404)
    assert page or root.text == "Kvasir is running\n"


# -- the files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES)
async def test_every_file_comes_with_strict_headers_and_without_a_key(path):
    async with client(ServeSettings(api_keys=("first-key",))) as http:
        response = await http.get(path)
        assert response.status_code == 200 and response.content
        headers = response.headers
        kind = TYPES["html" if path in ("/", "/docs") else path.rpartition(".")[2]]
        assert headers["content-type"] == kind
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy == POLICY
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-cache"
        again = await http.get(path, headers={"If-None-Match": headers["etag"]})
        assert again.status_code == 304 and not again.content and again.headers["etag"] == headers["etag"]
        assert (await http.get(path, headers={"If-None-Match": '"other"'})).status_code == 200
        head = await http.head(path)
        assert head.status_code == 200 and not head.content
        assert (await http.post(path)).status_code == 401


@pytest.mark.parametrize("path", ["/page", "/page/", "/page/static.py", "/page/../auth.py", "/page/%2e%2e/auth.py"])
async def test_paths_beside_the_pages_files_are_404_and_need_a_key(path):
    async with client(ServeSettings(api_keys=("first-key",))) as http:
        assert (await http.get(path)).status_code == 401
    async with client() as http:
        assert (await http.get(path)).status_code == 404


def test_the_page_needs_nothing_from_elsewhere_and_makes_no_markup_of_text():
    referred = set()
    for path, file in FILES.items():
        if path.startswith("/page/vendor/"):
            if path.endswith(".css"):
                referred |= {f"/page/vendor/{name}" for name in re.findall(r"url\(([^)]+)\)", file.content.decode())}
            continue
        text = file.content.decode()
        if path in ("/", "/docs"):
            referred |= set(re.findall(r'(?:src|href)="([^"#]+)"', text)) - {"/"}
            assert not re.search(r"<style|<script[^>]*>[^<]|\sstyle=|\son\w+=", text)
        else:
            imports = re.findall(r'(?:from|import) "\./([^"]+)"', text)
            referred |= {f"/page/{name}" for name in imports}
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
        foreign = re.findall(r"(?:https?:)?//[\w-]+\.[\w.-]+", re.sub(r"(?m)(^|\s)//\s.*", "", text))
        assert set(foreign) <= {"http://www.w3.org"}, path  # the namespace of SVG, which is never fetched
    assert referred == set(FILES) - {"/", "/docs"}


def fits(name: str, value: float) -> bool:
    try:
        SamplingParams(**{name: value})
    except InvalidRequest as error:
        assert error.param == name
        return False
    return True


def test_the_numbers_of_the_settings_are_fields_of_chats_within_their_bounds():
    script = FILES["/page/fields.js"].content.decode()
    inputs = json.loads(script.removeprefix("export const FIELDS = ").removesuffix(";\n"))
    assert len(inputs) >= 9 and {one["name"] for one in inputs} <= set(ChatRequest.model_fields)
    for one in inputs:
        name, low, high, step = one["name"], one["min"], one["max"], 1e-6 if one["step"] == "any" else one["step"]
        assert one["label"] and one["hint"]
        assert fits(name, low) and fits(name, high), name
        if name != "seed":  # JavaScript's exact integers are fewer than the server's
            assert not fits(name, low - step) and not fits(name, high + step), name


# -- the data ----------------------------------------------------------------------------------------------------


async def running(http, **fields):
    """An answer under way; close the stream to end it."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "stream": True, **fields}
    stream = http.front.engine.submit
    seen = asyncio.Event()

    def submit(request):
        seen.set()
        return stream(request)

    http.front.engine.submit = submit
    task = asyncio.create_task(http.post("/v1/chat/completions", json=body))
    await seen.wait()
    return task


async def test_a_snapshot_of_an_engine_at_work():
    async with client(step_seconds=0.01) as http:
        idle = (await http.get("/kvasir/live")).json()
        assert idle["answers"] == [] and idle["steps"] == [] and idle["groups"][0]["cells"] == [0, 399]
        assert idle["latency"]["ttft"] == {"p50": None, "p95": None, "p99": None, "count": 0}
        task = await running(http, n=2)
        while (live := (await http.get("/kvasir/live")).json())["stats"]["running"] < 2:
            await asyncio.sleep(0.02)
        assert [a["index"] for a in live["answers"]] == [0, 1]
        first = live["answers"][0]
        assert first["class"] == "interactive" and re.fullmatch(r"[0-9a-f]{8}", first["id"])
        assert first["known"] > first["prompt"] and first["age"] > 0
        assert sum(live["groups"][0]["cells"][1::2]) == live["groups"][0]["total"] == 399
        step, milliseconds, decode, prefill = live["steps"][0]
        assert step == 0 and milliseconds > 0 and decode + prefill > 0
        assert live["now"] > idle["now"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_tiles_have_values_in_each_snapshot_and_forms_that_the_page_knows():
    forms = set(re.findall(r"^  (\w+): \(", FILES["/page/tiles.js"].content.decode(), re.M))
    assert forms == set(get_args(Form))
    async with client() as http:
        tiles = (await http.get("/kvasir/info")).json()["tiles"]
        live = (await http.get("/kvasir/live")).json()
        for number in (number for numbers in tiles.values() for number in numbers):
            assert number["stat"] in live["latency" if number["form"] in ("median", "tail") else "stats"]
            assert number["of"] in {*live["stats"], ""} and number["form"] in forms


async def test_the_page_knows_whether_there_is_a_template_and_whether_there_are_replicas():
    for format in (template(), None):
        front = Front(EchoEngine(), byte_tokenizer(), format)
        async with client(front=front) as http:
            info = (await http.get("/kvasir/info")).json()
            assert info["has_template"] is (format is not None) and info["has_replicas"] is False
            assert info["parameters"] >= 0 and info["dtype"] == "float32" and info["device"] == "cpu"
            assert (await http.get("/fleet")).status_code == 404


async def test_a_key_sees_the_ids_of_its_own_answers_alone():
    keys = (Key("first-key", "one"), Key("second-key", "two"))
    async with client(ServeSettings(keys=keys), step_seconds=0.01) as http:
        assert (await http.get("/kvasir/live")).status_code == 401
        assert (await http.get("/kvasir/info")).status_code == 401
        http.headers["Authorization"] = "Bearer first-key"
        task = await running(http)
        shown = {}
        for key in ("first-key", "second-key"):
            while not shown.get(key):
                live = await http.get("/kvasir/live", headers={"Authorization": f"Bearer {key}"})
                shown[key] = live.json()["answers"]
                await asyncio.sleep(0.02)
                assert "one" not in live.json()["answers"] and '"tenant"' not in live.text
        assert shown["first-key"][0]["id"] and shown["second-key"][0]["id"] is None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_concurrent_requests_for_a_snapshot_ask_the_engine_once():
    async with client() as http:
        asked, look = [], http.front.engine.look

        async def counted():
            asked.append(1)
            return await look()

        http.front.engine.look = counted
        responses = await asyncio.gather(*(http.get("/kvasir/live") for _ in range(20)))
        assert {r.status_code for r in responses} == {200} and len(asked) == 1
        await asyncio.sleep(0.3)
        await http.get("/kvasir/live")
        assert len(asked) == 2


async def test_an_engine_that_does_not_answer_is_a_503(monkeypatch):
    monkeypatch.setattr("kvasir.serve.hosting.lookout.ENGINE_SECONDS", 0.02)
    async with client() as http:
        look = http.front.engine.look
        http.front.engine.look = lambda: asyncio.sleep(60)
        assert (await http.get("/kvasir/live")).status_code == 503
        http.front.engine.look = look
        monkeypatch.undo()  # a loaded machine needs longer
        await asyncio.sleep(0.3)
        assert (await http.get("/kvasir/live")).status_code == 200


async def test_a_client_that_disconnects_does_not_cancel_a_shared_snapshot():
    async with client() as http:
        lookout = Lookout(http.front)
        first, second = asyncio.ensure_future(lookout.look()), asyncio.ensure_future(lookout.look())
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).stats.running == 0
        http.front.engine.look = dead
        await asyncio.sleep(0.3)
        with pytest.raises(EngineDead):
            await lookout.look()


async def dead():
    raise EngineDead("gone")


async def test_the_pace_of_an_answer_is_its_mean_however_its_tokens_come():
    async with client(step_seconds=0.01) as http:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "temperature": 0}
        await asyncio.gather(*(http.post("/v1/chat/completions", json=body) for _ in range(3)))
        await http.post("/v1/chat/completions", json={**body, "max_tokens": 1})
        latency = (await http.get("/kvasir/live")).json()["latency"]
        assert latency["ttft"]["count"] == 4 and latency["tpot"]["count"] == 3
        assert latency["tpot"]["p50"] >= 0.009, "a step takes ten milliseconds"


@given(st.lists(st.floats(0, 100), min_size=1, max_size=300))
def test_percentiles_are_nearest_ranks(values):
    found = percentiles(values)
    assert found["count"] == len(values)
    for p in (50, 95, 99):
        value = found[f"p{p}"]
        assert sum(v <= value for v in values) >= math.ceil(p * len(values) / 100) > sum(v < value for v in values)
