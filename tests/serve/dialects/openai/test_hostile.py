"""The published schema is kept, and what bad requests cost."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing

import pytest

from kvasir.types import SamplingParams
from tests.serve.dialects.hostile import keep_to_schema, knocking
from tests.serve.running import assert_idle, client


@pytest.fixture(scope="module")
def http(server):
    with knocking(server) as http:
        yield http


@pytest.mark.slow
def test_the_published_schema_is_kept(http):
    keep_to_schema(http, "^/(?!v1/responses)", 10, most=4)


async def test_an_error_costs_no_thread():
    async with client() as http:
        before = threading.active_count()
        responses = await asyncio.gather(*(http.post("/v1/completions", content=b"{") for _ in range(20)))
        after = threading.active_count()
    assert {r.status_code for r in responses} == {400}
    assert after <= before  # those of other tests may end meanwhile


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
