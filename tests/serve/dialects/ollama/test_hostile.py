"""Odd bodies for the routes that manage models: each is answered or refused, and leaks nothing."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import strategies as st

from kvasir.serve.dialects.ollama.manage_wire import CopyRequest, CreateRequest, DeleteRequest, PullRequest, ShowRequest
from kvasir.serve.hosting.model_manager import ModelManager
from kvasir.serve.settings import ServeSettings
from kvasir.store.store import ModelStore
from tests.serve.dialects.hostile import VALUES, anything, keep_to_schema, try_bodies
from tests.serve.running import assert_idle, live_on
from tests.serve.shelf import Launcher, Shelf, offer

ROUTES = {
    "/api/show": ShowRequest,
    "/api/pull": PullRequest,
    "/api/create": CreateRequest,
    "/api/copy": CopyRequest,
    "/api/delete": DeleteRequest,
}
GOOD = {"model": "fake", "source": "a", "destination": "b"}


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    store = ModelStore(tmp_path_factory.mktemp("store"))
    shelf = Shelf([offer("fake")])
    make = lambda: ModelManager(shelf, Launcher(), ServeSettings(port=0), store=store)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        with live_on(make) as server, httpx.Client(base_url=server.url, timeout=30) as http:
            yield http
            for serving in server.catalogue.loaded():
                server.ask(assert_idle(serving.front))


@pytest.mark.parametrize("route", ROUTES)
def test_a_good_body_with_odd_fields(http, route):
    fields = {field.alias or name: field for name, field in ROUTES[route].model_fields.items()}
    base = {name: value for name, value in GOOD.items() if name in fields}
    if route in ("/api/pull", "/api/delete", "/api/create"):
        base["model"] = "nothing/is/there"
    odd = st.dictionaries(st.sampled_from(sorted(fields)), VALUES, max_size=3)
    try_bodies(http, route, odd.map(lambda odd: base | odd))


@pytest.mark.parametrize("route", ROUTES)
def test_arbitrary_bodies(http, route):
    try_bodies(http, route, anything(), most=20)


@pytest.mark.slow
def test_the_published_schema_is_kept(http):
    keep_to_schema(http, "^/api/", 15)
