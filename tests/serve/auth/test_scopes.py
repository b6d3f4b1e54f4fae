"""What keys of each scope may do, and who manages a server without keys."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable
from dataclasses import replace

import httpx
import pytest
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvasir.serve.app import create_app
from kvasir.serve.auth.keys import Key, KeyScope
from kvasir.serve.auth.scopes import needs_management
from kvasir.serve.dialects import DIALECTS, openai
from kvasir.serve.hosting.catalogue import OneModel
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.responses import json_response
from kvasir.serve.http.wire import Wire
from kvasir.serve.settings import ServeSettings
from tests.serve.fakes import EOS
from tests.serve.running import client, make_front

INFERENCE, MANAGEMENT, SPECIAL_TOKENS = KeyScope
KEYS = (
    Key("infer-key", "infers"),
    Key("manage-key", "manages", scopes=frozenset((MANAGEMENT,))),
    Key("both-keys", "does-both", scopes=frozenset((INFERENCE, MANAGEMENT))),
    Key("watch-key", "watches", scopes=frozenset()),
    Key("", "unknown", scopes=frozenset((MANAGEMENT,)), secret_sha256=hashlib.sha256(b"hidden-key").hexdigest()),
)
router = APIRouter(route_class=JsonRoute, prefix="/manage")


class Thing(Wire):
    name: str


@router.post("/things", tags=["management"])
async def make(wire: Thing) -> Response:
    return json_response({"made": wire.name})


@router.get("/things", tags=["management"])
async def things() -> Response:
    return json_response([])


@router.delete("/things/{name:path}", tags=["management"])
async def remove(name: str) -> Response:
    return json_response({"gone": name})


@router.post("/maybe", tags=["server"])
async def maybe(request: Request) -> Response:
    if request.query_params.get("manage"):
        needs_management(request)
    return json_response({})


@pytest.fixture(autouse=True)
def managed(monkeypatch):
    added = replace(openai.DIALECT, routers=(*openai.DIALECT.routers, router))
    monkeypatch.setattr("kvasir.serve.app.DIALECTS", (*DIALECTS[:-1], added))


MANAGING = [("POST", "/manage/things"), ("GET", "/manage/things"), ("DELETE", "/manage/things/a/b")]
INFERRING = [("POST", "/v1/completions"), ("POST", "/tokenize"), ("POST", "/manage/maybe")]
LOOKING = [("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/kvasir/live"), ("HEAD", "/health")]
BODIES = {
    "/manage/things": {"name": "a"},
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/tokenize": {"prompt": "x"},
}


@pytest.mark.parametrize(
    ("secret", "infers", "manages"),
    [
        ("infer-key", True, False),
        ("manage-key", False, True),
        ("both-keys", True, True),
        ("watch-key", False, False),
        ("hidden-key", False, True),
        ("plain-key", True, False),
    ],
)
async def test_scopes_determine_what_a_key_may_do(secret, infers, manages):
    settings = ServeSettings(keys=KEYS, api_keys=("plain-key",))
    async with client(settings, headers={"Authorization": f"Bearer {secret}"}) as http:
        for requests, may in ((MANAGING, manages), (INFERRING, infers), (LOOKING, True)):
            for method, path in requests:
                body = BODIES.get(path) if method == "POST" else None
                response = await http.request(method, path, json=body)
                assert (response.status_code != 403) == may, (method, path)
                assert response.status_code in (200, 405) if may else response.json()["error"]["code"] == "scope_needed"
        response = await http.post("/manage/maybe?manage=1")
        assert (response.status_code == 200) == (infers and manages)


async def test_the_scope_is_checked_before_the_body():
    async with client(ServeSettings(keys=KEYS)) as http:
        for secret, status in (("infer-key", 403), ("both-keys", 400)):
            headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
            assert (await http.post("/manage/things", content=b"{", headers=headers)).status_code == status


@pytest.mark.parametrize(
    ("peer", "headers", "may"),
    [
        ("127.0.0.1", {}, True),
        ("::1", {}, True),
        ("10.0.0.9", {}, False),
        ("127.0.0.1", {"Origin": "http://localhost:3000"}, True),
        ("127.0.0.1", {"Origin": "https://my.app"}, False),
        ("127.0.0.1", {"Origin": "null"}, False),
        ("127.0.0.1", {"X-Forwarded-For": "10.0.0.9"}, False),
        ("127.0.0.1", {"Forwarded": "for=10.0.0.9"}, False),
    ],
)
async def test_without_keys_only_this_machine_manages(peer, headers, may):
    app = create_app(OneModel(make_front(), ServeSettings(allowed_origins=("*",))))
    transport = httpx.ASGITransport(app, client=(peer, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as http:
        for method, path in MANAGING:
            response = await http.request(method, path, json=BODIES.get(path) if method == "POST" else None)
            assert response.status_code == (200 if may else 403), response.text
        assert (await http.post("/manage/maybe?manage=1")).status_code == (200 if may else 403)
        assert (await http.post("/manage/maybe")).status_code == 200


# -- control tokens in a conversation ----------------------------------------------------------------------

SAID = {"model": "fake", "messages": [{"role": "user", "content": "a<eos>b"}]}


def _counted(http, **fields) -> Awaitable[httpx.Response]:
    return http.post("/tokenize", json={**SAID, **fields})


async def test_text_becomes_control_tokens_for_keys_with_the_scope():
    """Without keys: for this machine itself. With keys: for those with the scope. `false` is for everybody."""
    async with client() as http:
        spelt = (await _counted(http)).json()["tokens"]
        trusted = (await _counted(http, trust_special_tokens=True)).json()["tokens"]
        assert trusted.count(EOS) == spelt.count(EOS) + 1
        assert (await _counted(http, trust_special_tokens=False)).json()["tokens"] == spelt
        asked = {**SAID, "trust_special_tokens": True}
        forwarded = await http.post("/tokenize", json=asked, headers={"x-real-ip": "8.8.8.8"})
        assert forwarded.status_code == 403 and "trust_special_tokens" in forwarded.text
    may = Key("trust-key", "trusts", scopes=frozenset((INFERENCE, SPECIAL_TOKENS)))
    async with client(ServeSettings(keys=(*KEYS, may))) as http:
        for secret, status in (("infer-key", 403), ("both-keys", 403), ("trust-key", 200)):
            http.headers["authorization"] = f"Bearer {secret}"
            assert (await _counted(http)).json()["tokens"] == spelt
            assert (await _counted(http, trust_special_tokens=False)).json()["tokens"] == spelt
            answer = await _counted(http, trust_special_tokens=True)
            assert answer.status_code == status and (
                "special_tokens" in answer.text or answer.json()["tokens"] == trusted
            )


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat", "/api/generate"]
)
async def test_every_dialect_asks_for_the_scope(path):
    async with client(ServeSettings(keys=KEYS), headers={"authorization": "Bearer infer-key"}) as http:
        reply = {"prompt": "a"} if path == "/api/generate" else {"input": "a"} if "responses" in path else SAID
        body = {"model": "fake", **reply, "trust_special_tokens": True}
        body |= {"max_tokens": 1} if path == "/v1/messages" else {}
        answer = await http.post(path, json=body)
        assert answer.status_code == 403 and "special_tokens" in answer.text
