"""Whatever a body says to Ollama's routes, the answer is one of the API's, never a 500, and nothing stays behind."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import strategies as st

from kvasir.serve.dialects.ollama.manage_wire import CopyRequest, CreateRequest, DeleteRequest, PullRequest, ShowRequest
from kvasir.serve.dialects.ollama.wire import ChatRequest, EmbeddingsRequest, EmbedRequest, GenerateRequest, Options
from kvasir.serve.hosting.model_manager import ModelManager
from kvasir.serve.settings import ServeSettings
from kvasir.store.store import Store
from tests.serve.dialects.hostile import VALUES, anything, keep_to_schema, ollama, try_bodies
from tests.serve.running import assert_idle, live_on
from tests.serve.shelf import Launcher, Shelf, offer

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
    make = lambda: ModelManager(shelf, Launcher(), ServeSettings(port=0), store=store)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        with live_on(make) as server, httpx.Client(base_url=server.url, timeout=30) as http:
            yield http
            for serving in server.catalogue.loaded():
                server.ask(assert_idle(serving.front))


@pytest.mark.parametrize("route", ROUTES)
def test_nearly_right_bodies(http, route):
    fields = {field.alias or name: field for name, field in ROUTES[route].model_fields.items()}
    base = {name: value for name, value in GOOD.items() if name in fields}
    if route in ("/api/pull", "/api/delete", "/api/create"):
        base["model"] = "nothing/is/there"
    odd = st.dictionaries(st.sampled_from(sorted(fields)), VALUES, max_size=3)
    options = st.dictionaries(st.sampled_from(sorted(Options.model_fields)), VALUES, max_size=3)

    def body(odd: dict, options: dict) -> dict:
        with_options = {"options": GOOD["options"] | options} if "options" in base else {}
        return base | with_options | odd

    try_bodies(http, route, st.builds(body, odd, options), ollama)


@pytest.mark.parametrize("route", ROUTES)
def test_bodies_that_are_anything(http, route):
    try_bodies(http, route, anything(), ollama, most=20)


@pytest.mark.slow
def test_the_published_schema_is_kept(http):
    keep_to_schema(http, "^/api/", 15)
