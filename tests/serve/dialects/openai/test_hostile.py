"""Whatever a body says, the answer is one of the API's, never a 500, and nothing stays behind."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing

import pytest
from hypothesis import strategies as st

from kvasir.serve.dialects.openai.wire import ChatRequest, CompletionRequest, EmbeddingRequest
from kvasir.types import SamplingParams
from tests.serve.dialects.hostile import VALUES, anything, judge, keep_to_schema, knocking, try_bodies
from tests.serve.running import assert_idle, client

ROUTES = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
}
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


def bodies(wire: type) -> st.SearchStrategy[dict]:
    """Bodies that are nearly right: a good prompt, and some fields with anything in them."""
    good = {"prompt": "ab", "input": "ab", "messages": [{"role": "user", "content": "hi"}], **SMALL}
    base = {k: v for k, v in good.items() if k in wire.model_fields}
    names = st.sampled_from(sorted(wire.model_fields))
    odd = st.dictionaries(names, VALUES, max_size=3)
    if "messages" in wire.model_fields:
        odd = st.builds(lambda m, o: {"messages": m} | o, MESSAGES, odd) | odd
    return odd.map(lambda o: base | o)


@pytest.fixture(scope="module")
def http(server):
    with knocking(server) as http:
        yield http


@pytest.mark.parametrize("route", ROUTES)
def test_nearly_right_bodies(http, route):
    try_bodies(http, route, bodies(ROUTES[route]))


@pytest.mark.parametrize("route", [*ROUTES, "/tokenize", "/detokenize"])
def test_bodies_that_are_anything(http, route):
    try_bodies(http, route, anything(), most=30)


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/json; charset=x"])
def test_bodies_of_other_kinds(http, kind):
    judge(http.post("/v1/completions", content=b'{"prompt": "ab"}', headers={"Content-Type": kind}))


def test_the_published_schema_is_kept(http):
    keep_to_schema(http, "^/(?!v1/responses)", 10, most=4)


async def test_an_error_costs_no_thread():
    async with client() as http:
        before = threading.active_count()
        responses = await asyncio.gather(*(http.post("/v1/completions", content=b"{") for _ in range(20)))
        after = threading.active_count()
    assert {r.status_code for r in responses} == {400}
    assert after == before


async def test_a_prefix_that_a_request_keeps_is_no_leak_and_a_request_that_stays_is_one():
    async with client() as http:
        body = {"prompt": "ab" * 100, "max_tokens": 3, "cache_ttl": 3600}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert (await http.front.stats()).blocks_used  # which `client` accepts when it ends
        prompt = await http.front.encode("ab")
        async with aclosing(http.front.stream(http.front.resolve(prompt, SamplingParams(max_tokens=400)))) as deltas:
            await anext(deltas)
            with pytest.raises(AssertionError, match="open requests"):
                await assert_idle(http.front, patience=0.0)
