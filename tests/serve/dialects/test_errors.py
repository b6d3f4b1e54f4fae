"""Each fault of the server is an error of the dialect: its format, its status, whole and streamed."""

from __future__ import annotations

import pytest

from kvasir.errors import EngineDead, QueueFull
from kvasir.serve.auth.keys import Key, KeyLimits
from kvasir.serve.settings import ServeSettings
from tests.serve.dialects.errors import error_of
from tests.serve.dialects.table import LENGTH, ROWS, objects
from tests.serve.running import client, make_front, out_of_time

ANN = {"Authorization": "Bearer ann-secret"}


def keys(**more) -> ServeSettings:
    return ServeSettings(keys=(Key("ann-secret", "ann", **more),))


async def errors(http, status: int, text: str = "ab", headers: dict | None = None, **body):
    """What each dialect says to this, whole and streamed."""
    for row in ROWS:
        for stream in (False, True):
            asked = {**row.request(text, stream, **{LENGTH: 5}), **body}
            response = await http.post(row.path_of(stream), json=asked, headers=headers)
            yield row, response, error_of(row.path_of(stream), response, status)


async def test_a_missing_key_is_a_401():
    async with client(keys()) as http:
        async for _ in errors(http, 401):
            pass
        async for _ in errors(http, 401, headers={"Authorization": "Bearer other-secret"}):
            pass


async def test_a_key_without_the_scope_is_a_403():
    async with client(keys(scopes=frozenset())) as http:
        async for _, _, error in errors(http, 403, headers=ANN):
            assert "inference" in error.message


async def test_an_unknown_model_is_a_404(http):
    async for row, _, error in errors(http, 404, model="other-model"):
        assert "other-model" in error.message and error.names("model"), row.path


async def test_a_body_that_is_too_large_is_a_413():
    async with client(ServeSettings(max_body=1000)) as http:
        async for row, _, error in errors(http, 413, "x" * 1000):
            assert "1000" in error.message, row.path


async def test_a_rate_above_the_limit_is_a_429():
    async with client(keys(limits=KeyLimits(requests_per_minute=1))) as http:
        assert (await http.post("/v1/completions", json={"prompt": "x"}, headers=ANN)).status_code == 200
        async for row, response, _ in errors(http, 429, headers=ANN):
            assert int(response.headers["retry-after"]) >= 1, row.path


@pytest.mark.parametrize(("raised", "status"), [(QueueFull("full"), 429), (EngineDead("gone"), 503)])
async def test_a_full_queue_and_a_dead_engine_state_the_time_to_retry(raised, status):
    front = make_front()

    async def submit(request):
        raise raised
        yield

    front.engine.submit = submit  # type: ignore[method-assign]
    async with client(front=front) as http:
        async for row, response, error in errors(http, status):
            assert str(raised) in error.message and int(response.headers["retry-after"]) >= 1, row.path


async def test_a_prompt_that_fails_in_the_engine_is_a_500_that_shows_nothing_of_its_inside():
    def fault(plan):
        raise RuntimeError("secret")

    async with client(fault=fault) as http:
        async for row, _, error in errors(http, 500):
            assert "secret" not in error.message, row.path


async def test_a_deadline_before_the_first_token_is_a_408():
    async with client(front=out_of_time(0)) as http:
        async for row, _, error in errors(http, 408):
            assert "deadline" in error.message, row.path


async def test_a_deadline_in_mid_answer_is_the_error_that_ends_the_stream(row):
    async with client(front=out_of_time(3)) as http:
        response = await http.post(row.path_of(True), json=row.request("ab", True))
        whole = await http.post(row.path, json=row.request("ab"))
    if row.path != "/v1/responses":  # which keeps what was generated, with the status "failed"
        error_of(row.path, whole, 408)
    *before, last = objects(response.text)
    assert response.status_code == 200 and before and "deadline" in str(last) and "error" in str(last)
    assert "[DONE]" not in response.text
