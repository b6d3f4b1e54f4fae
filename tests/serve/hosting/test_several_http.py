"""A server of several models over HTTP, with a store."""

from __future__ import annotations

import hashlib
import os
import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import pytest

from kvasir.config import EngineOptions
from kvasir.errors import EngineDead
from kvasir.serve.app import create_app
from kvasir.serve.hosting.offers import StoreOffers
from kvasir.store.modelfile import Modelfile
from kvasir.store.store import ModelStore
from tests.serve.shelf import MIB, Launcher, several
from tests.store import made


@pytest.fixture
def store(tmp_path) -> ModelStore:
    store = ModelStore(tmp_path / "store", any_path=True)
    store.pull(str(made.folder(tmp_path / "plain")))
    recipe = Modelfile(
        ("plain",), {"temperature": 0, "num_predict": 5, "stop": ["!"]}, system="S",
        messages=({"role": "user", "content": "u"}, {"role": "assistant", "content": "v"}),
    )  # fmt: skip
    store.create("own:1", recipe)
    return store


@asynccontextmanager
async def http_of(store: ModelStore, launcher: Launcher):
    offers = StoreOffers(store, EngineOptions(""))
    async with several(launcher, offers, store=store) as catalogue:  # type: ignore[arg-type]
        transport = httpx.ASGITransport(create_app(catalogue))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            yield http


async def test_all_routes_serve_all_models(store):
    async with http_of(store, Launcher()) as http:
        listed = (await http.get("/v1/models")).json()["data"]
        assert {card["id"] for card in listed} == {"plain:latest", "own:1"}
        assert {card["max_model_len"] for card in listed} == {512}
        assert (await http.get("/v1/models/plain")).json()["id"] == "plain:latest"
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/kvasir/live")).status_code == 503, "nothing is loaded, and nothing loaded for that"
        assert "model_name=" not in (await http.get("/metrics")).text.replace("kvasir_http", "")
        wrong = await http.post("/v1/completions", json={"model": "other", "prompt": "x"})
        assert wrong.status_code == 404 and "kvasir pull" in wrong.json()["error"]["message"]
        for name in ("plain", "own:1", "PLAIN:latest"):
            response = await http.post("/v1/completions", json={"model": name, "prompt": "abc", "max_tokens": 3})
            assert response.status_code == 200, response.text
        text = (await http.get("/metrics")).text
        assert "plain:latest" in text and "own:1" in text
        assert (await http.get("/kvasir/live", params={"model": "own:1"})).status_code == 200
        assert (await http.get("/health")).status_code == 200
        store.remove("plain")
        gone = await http.post("/v1/completions", json={"model": "plain", "prompt": "abc"})
        assert gone.status_code == 404


async def test_no_manifest_is_read_or_hashed_on_the_event_loop(store, monkeypatch):
    """A manifest may have megabytes, and others change them too."""
    threads = set()

    def watched(real):
        return lambda *arguments: (threads.add(threading.current_thread()), real(*arguments))[1]

    watched_os = SimpleNamespace(fstat=watched(os.fstat), scandir=watched(os.scandir))
    monkeypatch.setattr("kvasir.store.manifests.os", watched_os)
    monkeypatch.setattr("kvasir.store.entry.hashlib", SimpleNamespace(sha256=watched(hashlib.sha256)))
    async with http_of(store, Launcher()) as http:
        chat = {"model": "own:1", "messages": [{"role": "user", "content": "a"}], "stream": False}
        looks = ("/v1/models", "/v1/models/plain", "/api/tags", "/api/ps", "/kvasir/info")
        asks = [("GET", path, None) for path in looks]
        asks += [("POST", path, chat) for path in ("/v1/chat/completions", "/api/chat")]
        asks += [("POST", "/api/show", {"model": "own:1"})]
        for method, path, json in asks:
            threads.clear()
            store.copy("own:1", "own:2")  # what was read before is not enough
            threads.clear()
            response = await http.request(method, path, json=json)
            assert response.status_code == 200, response.text
            assert threading.current_thread() not in threads, path
            assert threads or path == "/api/ps"


async def test_a_request_overrides_the_models_defaults(store):
    async with http_of(store, Launcher()) as http:

        async def ask(**fields) -> dict:
            body = {"model": "own:1", "messages": [{"role": "user", "content": "abcdefghij"}], **fields}
            response = await http.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            return response.json()

        plain = await ask(model="plain", max_tokens=30, temperature=0)
        assert plain["choices"][0]["message"]["content"].startswith("user: abcdefghij")
        own = await ask()
        assert own["usage"]["completion_tokens"] == 5 and own["choices"][0]["finish_reason"] == "length"
        assert own["choices"][0]["message"]["content"] == "syste", "the echo of a prompt that begins with its system"
        assert "seed" not in own["choices"][0], "greedy, as it says"
        longer = await ask(max_tokens=60)
        text = longer["choices"][0]["message"]["content"]
        assert text.startswith("system: S\nuser: u\nassistant: v\nuser: abcdefghij")
        messages = [{"role": "system", "content": "T"}, {"role": "user", "content": "x"}]
        instead = (await ask(max_tokens=44, messages=messages))["choices"][0]["message"]["content"]
        assert instead.startswith("user: u\nassistant: v\nsystem: T\nuser: x")
        assert "seed" in (await ask(temperature=1))["choices"][0]
        body = {"model": "own:1", "prompt": "ab!cd"}
        completion = (await http.post("/v1/completions", json=body)).json()["choices"][0]
        assert completion["text"] == "ab" and completion["finish_reason"] == "stop"


async def test_all_dialects_apply_the_models_defaults(store):
    reply = "system: S\nuser: u\nassistant: v\nuser: abcdefghij"
    async with http_of(store, Launcher()) as http:
        question = [{"role": "user", "content": "abcdefghij"}]
        message = {"model": "own:1", "max_tokens": 60, "messages": question}
        answer = (await http.post("/v1/messages", json=message)).json()
        assert answer["content"][0]["text"].startswith(reply) and answer["model"] == "own:1"
        response = {"model": "own:1", "input": "abcdefghij", "max_output_tokens": 60, "store": False}
        answer = (await http.post("/v1/responses", json=response)).json()
        assert answer["output"][0]["content"][0]["text"].startswith(reply)
        chat = {"model": "own:1", "messages": question, "options": {"num_predict": 60}, "stream": False}
        assert (await http.post("/api/chat", json=chat)).json()["message"]["content"].startswith(reply)


async def test_missing_memory_is_a_503_with_retry_after(store):
    launcher = Launcher({"plain": EngineDead("x")})
    offers = StoreOffers(store, EngineOptions(""))
    async with several(launcher, offers, store=store, available=lambda: 100 * MIB) as catalogue:  # type: ignore[arg-type]
        transport = httpx.ASGITransport(create_app(catalogue))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            for path in ("/v1/completions", "/api/generate"):
                response = await http.post(path, json={"model": "plain", "prompt": "x"})
                assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
                assert "plain:latest is not loaded" in response.text
            assert launcher.loads == 0
