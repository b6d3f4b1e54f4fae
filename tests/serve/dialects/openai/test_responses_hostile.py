"""Odd ids, queries and lists of the Responses API are refused."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.dialects.hostile import FEW, keep_to_schema, knocking

PATHS = ["", "/input_items", "/cancel"]


@pytest.fixture(scope="module")
def http(server):
    with knocking(server) as http:
        yield http


@FEW
@given(
    st.text(max_size=70) | st.from_regex(r"resp_[0-9a-f]{48}", fullmatch=True),
    st.sampled_from(PATHS),
    st.dictionaries(
        st.sampled_from(["stream", "starting_after", "include[]", "include", "limit", "order", "after", "x"]),
        st.text(max_size=10) | st.integers().map(str) | st.sampled_from(["true", "asc"]), max_size=3,
    ),
)  # fmt: skip
def test_arbitrary_ids_and_queries_are_refused(http, id, path, query):
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
