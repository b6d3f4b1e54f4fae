"""Keys, hosts, origins and bounds: what is refused before any work."""

from __future__ import annotations

import json
import re
import socket
import time

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvasir.cli.app import app
from kvasir.errors import ConfigError
from kvasir.serve.app import OPEN_PATHS, create_app
from kvasir.serve.auth.guards import LOOKS, HostGuard
from kvasir.serve.hosting.catalogue import OneModel
from kvasir.serve.http.limits import json_excess
from kvasir.serve.http.networks import is_loopback
from kvasir.serve.settings import ServeSettings
from tests.serve.running import client, live, make_front

KEYS = ServeSettings(api_keys=("first-key", "second-key"))


def bearer(key: str) -> dict:
    return {"Authorization": f"Bearer {key}"}


# -- keys --------------------------------------------------------------------------------------------------


async def test_every_route_but_health_and_the_page_asks_for_a_key():
    async with client(KEYS) as http:
        app = http.app
        paths = {(m, r.path) for r in app.routes for m in getattr(r, "methods", ())}
        schema = app.openapi()["paths"]
        paths |= {(method.upper(), path) for path, methods in schema.items() for method in methods}
        assert ("POST", "/v1/chat/completions") in paths and ("GET", "/metrics") in paths
        unknown = [("GET", "/nowhere"), ("PUT", "/v1/models"), ("GET", "http://localhost//health")]
        for method, path in [*sorted(paths), *unknown]:
            response = await http.request(method, path)
            if path in OPEN_PATHS and method in LOOKS:
                assert response.status_code == 200, (method, path)
                continue
            assert response.status_code == 401, (method, path, response.status_code)
            assert response.headers["www-authenticate"] == "Bearer"
            assert method == "HEAD" or "a valid API key is needed" in response.text  # in its dialect's shape


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (bearer("first-key"), 200),
        (bearer("second-key"), 200),
        ({"Authorization": "bearer  second-key"}, 200),
        ({"X-API-Key": "first-key"}, 200),
        (bearer("first-ke"), 401),
        (bearer("first-key2"), 401),
        (bearer(""), 401),
        ({"Authorization": "first-key"}, 401),
        ({"Authorization": "Basic first-key"}, 401),
        ({"X-API-Key": ""}, 401),
        ({"X-API-Key": "\xff"}, 401),
        ({}, 401),
    ],
)
async def test_keys_are_distinguished(headers, status):
    async with client(KEYS) as http:
        raw = [(k.encode(), v.encode("latin-1")) for k, v in headers.items()]
        assert (await http.get("/v1/models", headers=raw)).status_code == status


async def test_each_key_has_its_own_cache_namespace():
    seen = []

    async def salts(settings: ServeSettings) -> list:
        seen.clear()
        async with client(settings) as http:
            submit = http.front.engine.submit
            http.front.engine.submit = lambda request: seen.append(request.cache_salt) or submit(request)
            for key in ("first-key", "second-key", "first-key"):
                body = {"prompt": "x", "max_tokens": 1}
                assert (await http.post("/v1/completions", json=body, headers=bearer(key))).status_code == 200
        return list(seen)

    first, second, again = await salts(KEYS)
    assert first == again != second and "first-key" not in first
    shared = ServeSettings(api_keys=KEYS.api_keys, share_cache=True)
    assert await salts(shared) == [None] * 3


def test_a_public_address_needs_a_key():
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org", ""):
        with pytest.raises(ConfigError, match="key"):
            ServeSettings(host=host)
        ServeSettings(host=host, api_keys=("long-enough",))
    for weak in ("short", "with space", "ümlautkey", "line\nbreak1"):
        with pytest.raises(ConfigError):
            ServeSettings(api_keys=(weak,))
    with pytest.raises(ConfigError):
        ServeSettings(port=70000)


def test_loopback_addresses_are_recognised():
    assert all(map(is_loopback, ("localhost", "LOCALHOST.", "a.localhost", "127.0.0.1", "127.9.9.9", "::1")))
    assert not any(
        map(is_loopback, ("localhost.evil.com", "127.0.0.1.evil.com", "0.0.0.0", "", "10.0.0.1", "evil", "0"))
    )


# -- host and origin ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "host", "status"),
    [
        ({}, "localhost:8000", 200),
        ({}, "127.0.0.1", 200),
        ({}, "[::1]:8000", 200),
        ({}, "evil.com", 403),
        ({}, "localhost.evil.com", 403),
        ({}, "localhost@evil.com", 403),
        ({}, "evil.com@localhost", 403),
        ({}, "localhost/evil", 403),
        ({}, "localhost:x", 403),
        ({}, "10.0.0.1", 403),
        ({}, "", 403),
        ({"allowed_hosts": ("my.host",)}, "MY.host:80", 200),
        ({"allowed_hosts": ("*",)}, "any.thing", 200),
        ({"host": "10.0.0.1"}, "10.0.0.1:8000", 200),
        ({"host": "10.0.0.1"}, "10.0.0.2:8000", 403),
        ({"host": "0.0.0.0"}, "10.0.0.2:8000", 200),
        ({"host": "0.0.0.0"}, "rebound.evil.com", 403),
    ],
)
async def test_only_names_of_this_server_are_served(settings, host, status):
    settings = ServeSettings(api_keys=("first-key",), **settings)
    async with client(settings) as http:
        response = await http.get("/health", headers={"Host": host})
        assert response.status_code == status, response.text


async def test_a_refusal_names_the_flag_that_allows_it():
    """It is one of `kvasir serve`."""
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    async with client() as http:
        for headers in ({"Host": "evil.com"}, {"Origin": "http://evil.com"}):
            message = (await http.get("/v1/models", headers=headers)).json()["error"]["message"]
            [flag] = re.findall(r"--[a-z-]+", message)
            assert f"{flag} " in shown, flag


@pytest.mark.parametrize(
    ("allowed", "origin", "good"),
    [
        ((), "http://localhost:3000", True),
        ((), "http://127.0.0.1:5173", True),
        ((), "https://[::1]", True),
        ((), "http://evil.com", False),
        ((), "http://localhost.evil.com", False),
        ((), "null", False),
        ((), "file://localhost", False),
        ((), "http://localhost:3000/path", False),
        (("https://my.app",), "https://my.app", True),
        (("https://my.app",), "http://my.app", False),
        (("*",), "http://evil.com", True),
    ],
)
async def test_pages_of_other_sites_may_not_ask(allowed, origin, good):
    async with client(ServeSettings(allowed_origins=allowed)) as http:
        response = await http.get("/v1/models", headers={"Origin": origin})
        assert response.status_code == (200 if good else 403)
        assert ("access-control-allow-origin" in response.headers) == good
        ask = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        ask["Access-Control-Request-Headers"] = "authorization, content-type"
        preflight = await http.options("/v1/completions", headers=ask)
        assert preflight.status_code == (200 if good else 403)


def test_a_page_of_the_server_itself_may_ask():
    guard = HostGuard(None, "10.0.0.1", (), ())  # type: ignore[arg-type]
    assert guard.admits("http://10.0.0.1:8000", "10.0.0.1:8000")
    assert not guard.admits("http://10.0.0.1:9000", "10.0.0.1:8000")


async def test_a_preflight_needs_no_key_and_gives_nothing_away():
    async with client(KEYS) as http:
        headers = {"Origin": "http://localhost:1", "Access-Control-Request-Method": "POST"}
        response = await http.options("/v1/models", headers=headers)
        assert response.status_code == 200 and "fake" not in response.text


# -- bounds ------------------------------------------------------------------------------------------------


async def test_body_limits_apply_while_bodies_arrive():
    async with client(ServeSettings(max_body=1000)) as http:
        declared = await http.post("/v1/completions", json={"prompt": "x" * 1000})
        assert declared.status_code == 413 and declared.json()["error"]["code"] == "too_large"

        async def pieces():
            for _ in range(20):
                yield b" " * 100

        streamed = await http.post("/v1/completions", content=pieces())
        assert streamed.status_code == 413
        for odd in ("-5", "5x", "9" * 30):
            headers = {"Content-Length": odd, "Content-Type": "application/json"}
            assert (await http.post("/v1/completions", content=b"{}", headers=headers)).status_code == 413


async def test_headers_and_urls_are_bounded():
    async with client(ServeSettings(max_headers=4096)) as http:
        assert (await http.get("/health", headers={"X": "x" * 5000})).status_code == 431
        assert (await http.get("/health", headers=[(f"X-{i}", "x") for i in range(200)])).status_code == 431
        assert (await http.get("/health?" + "x" * 5000)).status_code == 414


async def test_deep_json_is_refused():
    async with client() as http:
        for body in (
            b"[" * 100000,
            b'{"a":' * 1000 + b"1" + b"}" * 1000,
            b'{"tools":' + b"[" * 70 + b"]" * 70 + b"}",
        ):
            response = await http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
            assert response.status_code == 400 and "nested" in response.json()["error"]["message"]


def depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


JSON = st.recursive(
    st.none() | st.integers() | st.text('ab"\\[]{}é\n'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('k"\\[{'), inner, max_size=3),
    max_leaves=30,
)


@given(JSON, st.integers(0, 6), st.booleans())
def test_depth_is_measured_exactly(value, limit, ascii_only):
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert (json_excess(body, limit) is not None) == (depth(value) > limit)


LARGE = {
    "open": b"[" * 2**23,
    "empty": b"[]," * 2**22,
    "escapes": b'"\\"[' * 2**21,
    "quotes": b"[" * 100 + b'"' * 2**23,
    "nested": b"{" * 2**22 + b"}" * 2**22,
    "just": (b"[" * 64 + b"]" * 64 + b",") * 1500,
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_body_is_judged_quickly(name):
    begun = time.thread_time()
    assert (json_excess(LARGE[name], 64) is None) == (name == "just")
    assert time.thread_time() - begun < 1.0


async def test_request_ids_are_returned_or_generated():
    async with client() as http:
        assert (await http.get("/health", headers={"X-Request-Id": "my-id.1"})).headers["x-request-id"] == "my-id.1"
        odd = await http.get("/health", headers={"X-Request-Id": "a b\t"})
        assert len(odd.headers["x-request-id"]) == 24
        assert (await http.get("/nowhere")).headers["x-request-id"]


async def test_an_unexpected_error_is_a_500_without_internals():
    front = make_front()
    await front.start()
    front.engine.submit = None  # type: ignore[method-assign]
    transport = httpx.ASGITransport(create_app(OneModel(front, ServeSettings())), raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        for stream in (False, True):
            response = await http.post("/v1/completions", json={"prompt": "x", "stream": stream})
            assert response.status_code == 500
            error = response.json()["error"]
            assert error["type"] == "server_error" and "NoneType" not in response.text
    await front.stop()


async def test_errors_of_routing_have_the_same_shape(http):
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/", 405),
    ):
        response = await http.request(method, path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


# -- on a socket -------------------------------------------------------------------------------------------


def raw(server, data: bytes, wait: float = 5.0) -> bytes:
    """What the server says to these bytes until it closes the connection or `wait` seconds have passed."""
    address = server.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=wait) as s:
        answer = b""
        try:
            s.sendall(data)
            while piece := s.recv(65536):
                answer += piece
        except (TimeoutError, ConnectionError):
            pass
        return answer


@pytest.fixture(scope="module")
def strict():
    settings = ServeSettings(port=0, max_headers=8192, head_time=0.5, body_time=0.5, max_body=100_000)
    with live(settings) as server:
        yield server


def test_endless_headers_are_cut_off(strict):
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    assert b"400" in raw(strict, head + b"X: " + b"x" * 400_000)
    assert b"431" in raw(strict, head + b"X: " + b"x" * 9000 + b"\r\n\r\n", 1.0)
    chunked = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    answer = raw(strict, chunked + b"X-Trailer: " + b"x" * 400_000)
    assert answer.count(b"HTTP/1.1") <= 1


def test_slow_clients_are_disconnected(strict):
    begun = time.monotonic()
    assert raw(strict, b"GET /health HTT") == b""
    assert raw(strict, b"") == b""
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n"
    assert b"408" in raw(strict, head + b'{"prompt"')
    assert time.monotonic() - begun < 10


def test_garbage_is_refused_and_the_server_keeps_answering(strict):
    for garbage in (
        b"\x00" * 100,
        b"\x16\x03\x01" + b"\xff" * 200,
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ):
        assert b" 200 " not in raw(strict, garbage, 1.0)
    assert b"403" in raw(strict, b"GET /health HTTP/1.1\r\n\r\n", 1.0)
    assert httpx.get(f"{strict.url}/health").status_code == 200


def test_a_websocket_is_refused(strict):
    handshake = (
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    assert b"101" not in raw(strict, handshake, 1.0).split(b"\r\n")[0]


# -- pages of other origins --------------------------------------------------------------------------------


async def test_a_preflight_lists_the_allowed_headers_and_is_cached():
    settings = ServeSettings(
        allowed_origins=("https://my.app",),
        cors_headers=("Authorization", "X-Mine"),
        cors_methods=("GET", "POST"),
        cors_max_age=7,
        cors_credentials=True,
    )
    ask = {"Origin": "https://my.app", "Access-Control-Request-Method": "POST"}
    async with client(settings) as http:
        for method, wanted, status in (("POST", "x-mine", 200), ("POST", "x-other", 400), ("DELETE", "x-mine", 400)):
            headers = ask | {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": wanted}
            response = await http.options("/v1/models", headers=headers)
            assert response.status_code == status
        response = await http.options("/v1/models", headers=ask)
        assert response.headers["access-control-max-age"] == "7"
        assert response.headers["access-control-allow-origin"] == "https://my.app"
        assert response.headers["access-control-allow-credentials"] == "true"
    async with client() as http:
        for method in ("GET", "HEAD", "POST", "DELETE"):
            headers = {"Origin": "http://localhost:1", "Access-Control-Request-Method": method}
            response = await http.options("/v1/models", headers=headers)
            assert response.status_code == 200 and "access-control-allow-credentials" not in response.headers


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_origins": ("*",), "cors_credentials": True},
        {"cors_max_age": -1},
        {"cors_headers": ("a, b",)},
        {"cors_methods": ("GET\r\nX: y",)},
    ],
)
def test_cors_settings_unfit_for_browsers_are_refused(fields):
    with pytest.raises(ConfigError):
        ServeSettings(**fields)
