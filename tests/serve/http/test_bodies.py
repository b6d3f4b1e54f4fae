"""Bodies are JSON: every route reads them whatever their Content-Type says, and one that is none says what was sent."""

from __future__ import annotations

import httpx
import pytest
from fastapi.routing import APIRoute

from kvasir.serve.app import create_app
from kvasir.serve.hosting.catalogue import OneModel
from kvasir.serve.settings import ServeSettings
from tests.serve.running import make_front

FORM = "application/x-www-form-urlencoded"  # what `curl -d` claims to send
UPLOADS = ("/v1/files",)
ASKED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/completion": {"prompt": "a", "n_predict": 2},
    "/tokenize": {"content": "a"},
    "/api/chat": {
        "model": "fake",
        "messages": [{"role": "user", "content": "a"}],
        "stream": False,
        "options": {"num_predict": 2},
    },
}


def posts() -> list[str]:
    """Every route that reads a body of JSON."""
    routes = create_app(OneModel(make_front(), ServeSettings())).state.routes
    found = [r for r in routes if isinstance(r, APIRoute) and "POST" in r.methods and r.body_field is not None]
    return [route.path.replace("{", "").replace("}", "") for route in found if route.path not in UPLOADS]


def post(server, path: str, body: bytes, kind: str | None) -> httpx.Response:
    headers = {"content-type": kind} if kind else {}
    return httpx.post(server.url + path, content=body, headers=headers, timeout=30)


@pytest.mark.parametrize("kind", [None, FORM, "text/plain;charset=UTF-8"])
@pytest.mark.parametrize("path", ASKED)
def test_json_without_its_content_type_is_answered(server, path, kind):
    answer = httpx.post(server.url + path, json=ASKED[path], timeout=30)
    other = post(server, path, answer.request.content, kind)
    assert other.status_code == answer.status_code == 200, other.text
    assert other.json().keys() == answer.json().keys()


@pytest.mark.slow
def test_all_routes_judge_a_body_without_its_content_type_as_with_it(server):
    paths = posts()
    assert len(paths) > 25
    for path in paths:
        reported = []
        for kind in ("application/json", FORM, None):
            answer = post(server, path, b'{"no_such_field": 1}', kind)
            error = answer.json().get("error")
            reported.append((answer.status_code, error))
        assert reported[0] == reported[1] == reported[2], path


@pytest.mark.parametrize("kind", [FORM, "multipart/form-data; boundary=x", "application/xml"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/completion", "/api/chat"])
def test_a_body_that_is_no_json_is_refused_with_its_content_type(server, path, kind):
    answer = post(server, path, b"model=fake&prompt=a", kind)
    assert answer.status_code == 400
    for word in ("not valid JSON", "Content-Type", kind.split(";")[0]):
        assert word in answer.text
    assert "Content-Type" not in post(server, path, b"{", "application/json").text
