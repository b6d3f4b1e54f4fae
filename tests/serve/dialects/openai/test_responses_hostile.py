"""Whatever is asked of the Responses API, the answer is one of its own, never a 500, and nothing stays behind."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.serve.dialects.openai.responses.wire import ResponseRequest, TokenCountRequest
from tests.serve.dialects.hostile import FEW, VALUES, anything, keep_to_schema, knocking, try_bodies

KINDS = ["message", "function_call", "function_call_output", "reasoning", "item_reference", "mcp_call", ""]
NAMES = ["role", "content", "id", "call_id", "name", "arguments", "output", "summary", "encrypted_content", "status"]
PARTS = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["input_text", "output_text", "refusal", "reasoning_text", "x"])},
                          optional={"text": VALUES, "refusal": VALUES, "annotations": VALUES}), max_size=2
)  # fmt: skip
ITEMS = st.lists(
    st.dictionaries(st.sampled_from(NAMES), VALUES | PARTS | st.sampled_from(["user", "assistant", "c1"]), max_size=6)
    .flatmap(lambda item: st.sampled_from(KINDS).map(lambda kind: {**item, "type": kind} if kind else item)),
    max_size=4,
)  # fmt: skip
ROUTES = {"/v1/responses": ResponseRequest, "/v1/responses/input_tokens": TokenCountRequest}
PATHS = ["", "/input_items", "/cancel"]


@pytest.fixture(scope="module")
def http(server):
    with knocking(server) as http:
        yield http


@pytest.mark.parametrize("route", ROUTES)
def test_nearly_right_bodies(http, route):
    wire = ROUTES[route]
    small = {"max_output_tokens": 3, "stream": False} if wire is ResponseRequest else {}
    odd = st.dictionaries(st.sampled_from(sorted(wire.model_fields)), VALUES, max_size=3)
    inputs = st.just({}) | ITEMS.map(lambda items: {"input": items})
    try_bodies(http, route, st.builds(lambda odd, given: {"input": "ab", **small, **odd, **given}, odd, inputs))


@pytest.mark.parametrize("route", ROUTES)
def test_bodies_that_are_anything(http, route):
    try_bodies(http, route, anything(), most=30)


@FEW
@given(
    st.text(max_size=70) | st.from_regex(r"resp_[0-9a-f]{48}", fullmatch=True),
    st.sampled_from(PATHS),
    st.dictionaries(
        st.sampled_from(["stream", "starting_after", "include[]", "include", "limit", "order", "after", "x"]),
        st.text(max_size=10) | st.integers().map(str) | st.sampled_from(["true", "asc"]), max_size=3,
    ),
)  # fmt: skip
def test_ids_and_queries_that_are_anything(http, id, path, query):
    url = httpx.URL("http://x/v1/responses/").raw_path.decode() + "".join(f"%{b:02x}" for b in id.encode()) + path
    for method in ("POST",) if path == "/cancel" else ("GET", "DELETE"):
        answer = http.request(method, url, params=query)
        assert answer.status_code in (307, 400, 404, 405), (url, answer.text)


def test_a_large_body_is_bounded_in_every_list(http):
    item = {"role": "user", "content": "x"}
    tool = {"type": "function", "name": "f"}
    for body in (
        {"input": [item] * 16385},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 1025}]},
        {"input": "x", "tools": [tool] * 1025},
        {"input": "x", "include": ["reasoning.encrypted_content"] * 17},
        {"input": [{"type": "function_call", "call_id": str(i), "name": "f", "arguments": "{}"} for i in range(1025)]},
    ):
        assert http.post("/v1/responses", json=body).status_code == 400
    deep: dict = {}
    for _ in range(100):
        deep = {"x": deep}
    assert http.post("/v1/responses", json={"input": "x", "metadata": deep}).status_code == 400
    assert http.post("/v1/responses", content=b"x" * (17 << 20)).status_code == 413


@pytest.mark.slow
def test_the_published_schema_is_kept(http):
    keep_to_schema(http, "^/v1/responses", 6, most=10)
