"""Whatever a body says, the answer is one of the API's, never a 500, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import threading

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvasir.serve.openai.wire import ChatRequest, CompletionRequest, EmbeddingRequest
from tests.serve.running import assert_idle, client

ROUTES = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
}
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True)
    | st.text(max_size=20)
    | st.sampled_from(["", "text", "user", "auto", "\x00", "\ud800", "<eos>", "{{ 1 }}", "a" * 5000])
)
VALUES = st.recursive(
    SCALARS,
    lambda v: (
        st.lists(v, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "name", "arguments", "url", "5"]) | st.text(max_size=5),
            v,
            max_size=4,
        )
    ),
    max_leaves=12,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "function"])},
        optional={
            "content": VALUES,
            "name": VALUES,
            "tool_calls": VALUES,
            "function_call": VALUES,
            "refusal": VALUES,
        },
    ),
    min_size=1,
    max_size=3,
)
SMALL = {"max_tokens": 3}
FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def bodies(wire: type) -> st.SearchStrategy[dict]:
    """Bodies that are nearly right: a good prompt, and some fields with anything in them."""
    good = {"prompt": "ab", "input": "ab", "messages": [{"role": "user", "content": "hi"}], **SMALL}
    base = {k: v for k, v in good.items() if k in wire.model_fields}
    names = st.sampled_from(sorted(wire.model_fields))
    odd = st.dictionaries(names, VALUES, max_size=3)
    if "messages" in wire.model_fields:
        odd = st.builds(lambda m, o: {"messages": m} | o, MESSAGES, odd) | odd
    return odd.map(lambda o: base | o)


def judge(response: httpx.Response) -> None:
    assert response.status_code in (200, 400, 404, 429), response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"] and set(error) == {"message", "type", "param", "code"}
        assert "Traceback" not in response.text and ".py" not in response.text


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=30) as http:
        yield http
    server.ask(assert_idle(server.front))


@pytest.mark.parametrize("route", ROUTES)
def test_nearly_right_bodies(http, route):
    @FEW
    @given(bodies(ROUTES[route]))
    def check(body: dict) -> None:
        data = json.dumps(body, ensure_ascii=True).encode()
        judge(http.post(route, content=data, headers={"Content-Type": "application/json"}))

    check()


@pytest.mark.parametrize("route", [*ROUTES, "/tokenize", "/detokenize"])
def test_bodies_that_are_anything(http, route):
    @settings(FEW, max_examples=30)
    @given(st.binary(max_size=100) | VALUES.map(lambda v: json.dumps(v).encode()))
    def check(body: bytes) -> None:
        judge(http.post(route, content=body, headers={"Content-Type": "application/json"}))

    check()


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/json; charset=x"])
def test_bodies_of_other_kinds(http, kind):
    judge(http.post("/v1/completions", content=b'{"prompt": "ab"}', headers={"Content-Type": kind}))


CHECKS = [
    schemathesis.checks.not_a_server_error,
    schemathesis.checks.status_code_conformance,
    schemathesis.checks.content_type_conformance,
]


def test_the_published_schema_is_kept(server):
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 10
    for operation in operations:

        @settings(FEW, max_examples=5)
        @given(operation.as_strategy())
        def check(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=CHECKS)

        check()


async def test_an_error_costs_no_thread():
    async with client() as http:
        before = threading.active_count()
        responses = await asyncio.gather(*(http.post("/v1/completions", content=b"{") for _ in range(20)))
        after = threading.active_count()
    assert {r.status_code for r in responses} == {400}
    assert after == before
