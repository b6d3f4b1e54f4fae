"""Bodies of the Messages API with too many or too large parts are refused."""

from __future__ import annotations

import pytest

from tests.serve.dialects.hostile import judge, knocking, send

ROUTES = ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches")


@pytest.fixture(scope="module")
def http(server):
    with knocking(server) as http:
        yield http


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": ' + b"[" * 100_000,
        b'{"max_tokens": 3, "messages": [{"role": "user", "content": "%s"}]}' % (b"x" * 200_000),
        b'{"max_tokens": 3, "messages": [%s]}' % b",".join([b'{"role": "user", "content": "x"}'] * 20_000),
        b'{"max_tokens": 99999999999999999999, "messages": [{"role": "user", "content": "x"}]}',
        b'{"max_tokens": 3, "messages": [{"role": "user", "content": [%s]}]}'
        % b",".join([b'{"type": "text", "text": "x"}'] * 2000),
        b'{"max_tokens": 3, "messages": [{"role": "user", "content": "x"}], "tools": [%s]}'
        % b",".join([b'{"name": "f", "input_schema": {}}'] * 2000),
    ],
    ids=["deep", "long", "many messages", "large number", "many blocks", "many tools"],
)
def test_too_much_is_refused(http, route, body):
    response = send(http, route, body)
    judge(route, response)
    assert response.status_code == 400 or route.endswith("count_tokens")
