"""Routes and names that clients of other servers use, and what a server can do without."""

from __future__ import annotations

import pytest

from kvasir.serve.settings import ServeSettings
from tests.serve.running import client

CHAT = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 5}
KEYS = ServeSettings(api_keys=("a-key-of-mine",))


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/chat/completions", CHAT),
        ("POST", "/responses", {"input": "hi", "temperature": 0, "max_output_tokens": 5}),
        ("GET", "/models", None),
        ("GET", "/models/fake", None),
    ],
)
async def test_routes_are_known_without_their_version(method, path, body):
    async with client() as http:
        short, long = [await http.request(method, p, json=body) for p in (path, f"/v1{path}")]
        assert short.status_code == long.status_code == 200
        assert short.json().keys() == long.json().keys() and short.json()["object"] == long.json()["object"]
        assert (await http.get("/modelsandmore")).status_code == 404


async def test_a_short_path_needs_the_same_key():
    async with client(KEYS) as http:
        assert (await http.post("/chat/completions", json=CHAT)).status_code == 401
        headers = {"authorization": "Bearer a-key-of-mine"}
        assert (await http.post("/chat/completions", json=CHAT, headers=headers)).status_code == 200


async def test_a_stored_response_is_found_at_its_short_path(http):
    made = (await http.post("/responses", json={"input": "hi", "max_output_tokens": 3})).json()
    assert (await http.get(f"/responses/{made['id']}")).json()["id"] == made["id"]


async def test_a_supervisor_needs_no_key():
    async with client(KEYS) as http:
        assert (await http.get("/ping")).json() == {"status": "ok"}
        assert (await http.head("/ping")).status_code == 200
        assert (await http.get("/load")).status_code == 401


async def test_what_is_open_and_what_is_served(http):
    assert (await http.get("/load")).json() == {"server_load": 0}
    for path in ("/get_model_info", "/model_info"):
        found = (await http.get(path)).json()
        assert found["model_path"] == "fake" and found["is_generation"] is True


async def test_a_model_has_further_names():
    async with client(ServeSettings(model_names=("one", "two"))) as http:
        for name in ("one", "two", "one:latest"):
            assert (await http.get(f"/v1/models/{name}")).status_code == 200
            assert (await http.post("/v1/chat/completions", json={**CHAT, "model": name})).status_code == 200
        assert (await http.post("/v1/chat/completions", json={**CHAT, "model": "three"})).status_code == 404


@pytest.mark.parametrize("page", [True, False])
async def test_a_server_can_do_without_the_page(page):
    async with client(ServeSettings(page=page)) as http:
        found = await http.get("/")
        assert found.status_code == 200 and ("html" in found.headers["content-type"]) == page
        assert (await http.get("/page/page.css")).status_code in ((200, 404) if page else (404,))
        assert (await http.get("/health")).status_code == 200
