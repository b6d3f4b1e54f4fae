"""Odd values, requests with them, and the judge of what is answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.serve.dialects.errors import error_of, speaks
from tests.serve.running import Live, assert_idle

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True)
    | st.text(max_size=20)
    | st.sampled_from(["", "text", "user", "auto", "\x00", "\ud800", "<eos>", "{{ 1 }}", "a" * 5000])
)
NAMES = st.sampled_from(["role", "content", "type", "text", "name", "arguments", "url", "5"]) | st.text(max_size=5)
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=4) | st.dictionaries(NAMES, v, max_size=4), max_leaves=12)
FEW = examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
CHECKS = [
    schemathesis.checks.not_a_server_error,
    schemathesis.checks.status_code_conformance,
    schemathesis.checks.content_type_conformance,
]


def judge(path: str, response: httpx.Response) -> None:
    """The response is an answer, or an error of the dialect that the client can do something about."""
    if path == "/generate" and response.status_code != 200 and "error_type" not in response.json():
        path = "/sglang/generate"  # the body had a field of SGLang's, whose errors have another form than TGI's
    status = next((ours for ours, own in speaks(path).statuses.items() if own == response.status_code), None)
    status = status or response.status_code
    assert status in (200, 400, 404, 429), response.text
    if status != 200:
        error_of(path, response, status)


# -- requests ------------------------------------------------------------------------------------------------


@contextmanager
def knocking(server: Live) -> Iterator[httpx.Client]:
    """A client of a server, which leaves nothing in it."""
    with httpx.Client(base_url=server.url, timeout=30) as http:
        yield http
    server.ask(assert_idle(server.front))


def send(http: httpx.Client, route: str, body: object, method: str = "POST") -> httpx.Response:
    data = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=True).encode()
    return http.request(method, route, content=data, headers={"Content-Type": "application/json"})


def try_bodies(http: httpx.Client, route: str, bodies: st.SearchStrategy, most: int = 40) -> None:
    method = "DELETE" if route == "/api/delete" else "POST"

    @settings(examples(most), suppress_health_check=FEW.suppress_health_check)
    @given(bodies)
    def check(body: object) -> None:
        judge(route, send(http, route, body, method))

    check()


def anything() -> st.SearchStrategy[object]:
    return st.binary(max_size=100) | VALUES


def keep_to_schema(http: httpx.Client, path: str, count: int, most: int = 5) -> None:
    """What is sent and answered is as /openapi.json says. path: a pattern of the routes, which are at least so many."""
    schema = schemathesis.openapi.from_url(f"{http.base_url}/openapi.json").include(path_regex=path)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= count
    for operation in operations:

        @settings(examples(most), suppress_health_check=FEW.suppress_health_check)
        @given(operation.as_strategy())
        def check(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=CHECKS)

        check()
