"""Whatever a body says to Ollama's routes, the answer is one of the API's, never a 500, and nothing stays behind."""

from __future__ import annotations

import json

import httpx
import pytest
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.serve.ollama.manage_wire import CopyRequest, CreateRequest, DeleteRequest, PullRequest, ShowRequest
from kvasir.serve.ollama.wire import ChatRequest, EmbeddingsRequest, EmbedRequest, GenerateRequest, Options
from kvasir.serve.settings import ServeSettings
from kvasir.serve.several import Several
from kvasir.store.store import Store
from tests.serve.running import assert_idle, live_on
from tests.serve.shelf import Launcher, Shelf, offer
from tests.serve.test_hostile import CHECKS, FEW, VALUES

ROUTES = {
    "/api/generate": GenerateRequest,
    "/api/chat": ChatRequest,
    "/api/embed": EmbedRequest,
    "/api/embeddings": EmbeddingsRequest,
    "/api/show": ShowRequest,
    "/api/pull": PullRequest,
    "/api/create": CreateRequest,
    "/api/copy": CopyRequest,
    "/api/delete": DeleteRequest,
}
GOOD = {
    **{"model": "fake", "prompt": "ab", "input": "ab", "messages": [{"role": "user", "content": "hi"}]},
    **{"options": {"num_predict": 3}, "source": "a", "destination": "b"},
}


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("store"))
    shelf = Shelf([offer("fake")])
    make = lambda: Several(shelf, Launcher(), ServeSettings(port=0), store=store)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        with live_on(make) as server, httpx.Client(base_url=server.url, timeout=30) as http:
            yield http
            for serving in server.catalogue.loaded():
                server.ask(assert_idle(serving.front))


def judge(response: httpx.Response) -> None:
    assert response.status_code in (200, 400, 404, 429), response.text
    if response.status_code != 200:
        assert response.json()["error"] and set(response.json()) == {"error"}
        assert "Traceback" not in response.text and ".py" not in response.text


def send(http: httpx.Client, route: str, body: bytes) -> httpx.Response:
    return http.request("DELETE" if route == "/api/delete" else "POST", route, content=body)


@pytest.mark.parametrize("route", ROUTES)
def test_nearly_right_bodies(http, route):
    fields = {field.alias or name: field for name, field in ROUTES[route].model_fields.items()}
    base = {name: value for name, value in GOOD.items() if name in fields}
    if route in ("/api/pull", "/api/delete", "/api/create"):
        base["model"] = "nothing/is/there"
    odd = st.dictionaries(st.sampled_from(sorted(fields)), VALUES, max_size=3)
    options = st.dictionaries(st.sampled_from(sorted(Options.model_fields)), VALUES, max_size=3)

    @FEW
    @given(odd, options)
    def check(odd: dict, options: dict) -> None:
        body = base | odd
        if isinstance(body.get("options"), dict) and "options" not in odd:
            body["options"] = GOOD["options"] | options
        judge(send(http, route, json.dumps(body).encode()))

    check()


@pytest.mark.parametrize("route", ROUTES)
def test_bodies_that_are_anything(http, route):
    @settings(FEW, max_examples=20)
    @given(st.binary(max_size=100) | VALUES.map(lambda v: json.dumps(v).encode()))
    def check(body: bytes) -> None:
        judge(send(http, route, body))

    check()


@pytest.mark.slow
def test_the_published_schema_is_kept(http):
    schema = schemathesis.openapi.from_url(f"{http.base_url}/openapi.json")
    operations = [
        operation for result in schema.get_all_operations() if (operation := result.ok()).path.startswith("/api/")
    ]
    assert len(operations) >= 15
    for operation in operations:

        @settings(FEW, max_examples=5)
        @given(operation.as_strategy())
        def check(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=CHECKS)

        check()
