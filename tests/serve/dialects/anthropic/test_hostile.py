"""Whatever a body of the Messages API says, the answer is one of the API's, never a 500, and nothing stays behind."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from kvasir.serve.dialects.anthropic.batches import MessageBatchRequest
from kvasir.serve.dialects.anthropic.wire import CountRequest, MessagesRequest
from tests.serve.dialects.hostile import VALUES, anthropic, judge, knocking, send, try_bodies

ROUTES = {
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/v1/messages/batches": MessageBatchRequest,
}
KINDS = st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image", "redacted_thinking", "\ud800"])
TEXT = st.text(max_size=5)
BLOCKS = st.fixed_dictionaries(
    {"type": KINDS},
    optional={
        "text": TEXT | VALUES,
        "thinking": TEXT | VALUES,
        "signature": st.sampled_from(["", "carries.", "carries.!", "carries./w=="]) | VALUES,
        "id": st.just("a") | VALUES,
        "tool_use_id": st.just("a") | VALUES,
        "name": st.just("f") | VALUES,
        "input": st.dictionaries(TEXT, VALUES, max_size=2) | VALUES,
        "content": VALUES,
        "is_error": VALUES,
        "cache_control": VALUES,
    },
)
GOOD = st.sampled_from(
    [
        {"type": "text", "text": "x"},
        {"type": "thinking", "thinking": "", "signature": "carries./w=="},
        {"type": "tool_use", "id": "a", "name": "f", "input": {"k": 1}},
        {"type": "tool_result", "tool_use_id": "a", "content": "r"},
    ]
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "tool"]),
            "content": st.lists(GOOD | BLOCKS, max_size=3) | TEXT | VALUES,
        }
    ),
    max_size=4,
)


def bodies(wire: type) -> st.SearchStrategy[dict]:
    """Bodies that are nearly right."""
    base = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    base = {k: v for k, v in base.items() if k in wire.model_fields}
    odd = st.dictionaries(st.sampled_from(sorted(wire.model_fields)), VALUES, max_size=2)
    return st.builds(lambda m, o: base | ({"messages": m} if m else {}) | o, MESSAGES, odd)


@pytest.fixture(scope="module")
def http(server):
    with knocking(server) as http:
        yield http


@pytest.mark.parametrize("route", ROUTES)
def test_nearly_right_bodies(http, route):
    try_bodies(http, route, bodies(ROUTES[route]), anthropic, most=80)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"messages": ' + b"[" * 100_000,
        b'{"max_tokens": 3, "messages": [{"role": "user", "content": "%s"}]}' % (b"x" * 200_000),
        b'{"max_tokens": 3, "messages": [%s]}' % b",".join([b'{"role": "user", "content": "x"}'] * 20_000),
        b'{"max_tokens": 99999999999999999999, "messages": [{"role": "user", "content": "x"}]}',
        b'{"max_tokens": 3, "messages": [{"role": "user", "content": [%s]}]}'
        % b",".join([b'{"type": "text", "text": "x"}'] * 2000),
        b'{"max_tokens": 3, "messages": [{"role": "user", "content": "x"}], "tools": [%s]}'
        % b",".join([b'{"name": "f", "input_schema": {}}'] * 2000),
    ],
    ids=["empty", "list", "deep", "long", "many messages", "large number", "many blocks", "many tools"],
)
def test_too_much_is_refused(http, route, body):
    response = send(http, route, body)
    judge(response, anthropic)
    assert response.status_code == 400 or route.endswith("count_tokens")
