"""Connections on real sockets: bounds on all and on each address, a way in for health checks, and answers that a client
can read while it is still sending."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import socket
import time
from collections.abc import Iterator

import httpx
import pytest
import uvicorn

from kvasir.errors import ConfigError
from kvasir.serve.http.connections import NARROW, NARROW_HERE, QUIET, Connections, descriptors
from kvasir.serve.http.networks import forwarded, networks, party, trusted
from kvasir.serve.http.protocol import bounded_protocol
from kvasir.serve.settings import ServeSettings
from tests.serve.dialects.errors import Shape, anthropic, llamacpp, ollama, openai
from tests.serve.running import Live, live

MIB = 1 << 20


@pytest.fixture(scope="module")
def small() -> Iterator[Live]:
    """A server with few connections and small bodies."""
    settings = ServeSettings(
        port=0, max_connections=40, max_connections_per_address=20, max_body=MIB, trusted_proxies=("127.0.0.99",)
    )
    with live(settings) as server:
        yield server


def connect(server: Live, source: str) -> socket.socket:
    place = httpx.URL(server.url)
    return socket.create_connection((place.host, place.port or 80), 20, (source, 0))


def asked(connection: socket.socket, path: str, headers: str = "") -> bytes:
    """The whole answer to a GET; empty where the connection was closed."""
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n".encode()
    answer = b""
    with contextlib.suppress(ConnectionError):
        connection.sendall(head)
        while piece := connection.recv(65536):
            answer += piece
    return answer


def status(server: Live, path: str, source: str = "127.0.0.1", headers: str = "") -> int:
    with connect(server, source) as connection:
        answer = asked(connection, path, headers)
        return int(answer.split()[1]) if answer else 0


@contextlib.contextmanager
def crowd(server: Live, *counts: tuple[str, int]) -> Iterator[None]:
    """Idle connections, so many from each address; all are gone at the end."""
    with contextlib.ExitStack() as stack:
        for source, count in counts:
            for _ in range(count):
                stack.enter_context(connect(server, source))
        yield
    deadline = time.monotonic() + 30
    while server.server.server_state.connections and time.monotonic() < deadline:
        time.sleep(0.01)


# -- bounds ----------------------------------------------------------------------------------------------------


def test_one_address_leaves_room_for_others_and_for_health(small):
    with crowd(small, ("127.0.0.2", 150)):
        assert status(small, "/v1/models", "127.0.0.2") == 429
        assert status(small, "/health", "127.0.0.2") == 200
        assert status(small, "/v1/models", "127.0.0.3") == 200
    assert status(small, "/v1/models", "127.0.0.2") == 200, "they have left"


def test_many_addresses_leave_room_for_health_metrics_and_management(small):
    with crowd(small, *((f"127.0.0.{n}", 15) for n in range(10, 24))):
        assert status(small, "/v1/models", "127.0.0.3") == 503
        for path in ("/health", "/v1/health", "/metrics"):
            assert status(small, path, "127.0.0.3") == 200
    assert status(small, "/v1/models", "127.0.0.3") == 200


@pytest.mark.parametrize(("path", "shape"), [("/v1/models", openai), ("/api/tags", ollama), ("/props", llamacpp)])
def test_a_refused_connection_gets_the_dialects_error(small, path, shape: Shape):
    with crowd(small, ("127.0.0.2", 20)), connect(small, "127.0.0.2") as connection:
        head, _, body = asked(connection, path).partition(b"\r\n\r\n")
        assert b" 429 " in head and b"retry-after: 5" in head.lower() and b"connection: close" in head.lower()
        shape(json.loads(body), 429)


def test_a_trusted_proxy_is_not_bounded_and_its_clients_are(small):
    with crowd(small, ("127.0.0.99", 25)):
        assert status(small, "/v1/models", "127.0.0.99") == 200
        assert status(small, "/v1/models", "127.0.0.99", "X-Forwarded-For: 192.0.2.1\r\n") == 200
        connections = small.server.config.app.state.connections
        held = [connections.enter("192.0.2.1") for _ in range(21)]
        assert held == [True] * 20 + [False]
        assert status(small, "/v1/models", "127.0.0.99", "X-Forwarded-For: 9.9.9.9, 192.0.2.1\r\n") == 429
        assert status(small, "/v1/models", "127.0.0.99", "X-Forwarded-For: 192.0.2.1, 192.0.2.2\r\n") == 200
        assert status(small, "/health", "127.0.0.99", "X-Forwarded-For: 192.0.2.1\r\n") == 200
        for _ in range(20):
            connections.leave("192.0.2.1")


def test_bytes_that_are_no_request_do_not_keep_a_connection_open():
    with live(ServeSettings(port=0, head_time=0.5)) as server, connect(server, "127.0.0.1") as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in connection.recv(65536)
        with pytest.raises(ConnectionError):
            for _ in range(200):  # for 20 seconds
                connection.sendall(b"\r\n")
                time.sleep(0.1)


class Idle:
    waits = True
    dropped = False

    def drop(self) -> None:
        self.dropped = True


def test_new_connections_replace_silent_ones_and_the_log_stays_short(caplog):
    now = [0.0]
    connections = Connections(1, 1, (), lambda: now[0])
    assert connections.open(Idle(), "192.0.2.1") is None
    here = [Idle() for _ in range(NARROW_HERE + 1)]
    with caplog.at_level(logging.WARNING, "kvasir.serve"):
        assert {connections.open(one, "192.0.2.1") for one in here} == {"the server"}
        assert [one.dropped for one in here] == [True] + [False] * NARROW_HERE
        many = [Idle() for _ in range(NARROW)]
        for i, one in enumerate(many):
            assert connections.open(one, f"198.51.100.{i}") == "the server"
        assert all(one.dropped for one in here) and not any(one.dropped for one in many)
        for one in many:
            one.waits = False
        assert connections.open(Idle(), "203.0.113.1") == "full"
        assert len(caplog.records) == 1
        now[0] += QUIET
        connections.open(Idle(), "203.0.113.1")
    assert [record.args[0].split()[0] for record in caplog.records] == ["1", str(NARROW_HERE + NARROW + 2)]


def test_connections_are_counted_by_ipv4_address_or_ipv6_network():
    assert party("2001:db8:1:2::1") == party("2001:db8:1:2:ffff::9") != party("2001:db8:1:3::1")
    assert party("::ffff:192.0.2.1") == party("192.0.2.1") != party("192.0.2.2")
    assert party("fe80::1%eth0") and party(None) == party("unknown") == ""
    proxies = networks(["10.0.0.0/8", "2001:db8::/32"])
    assert trusted("10.1.2.3", proxies) and trusted("::ffff:10.1.2.3", proxies) and not trusted("11.0.0.1", proxies)
    for wrong in ("10.0.0.1/8", "proxy.example", ""):
        with pytest.raises(ConfigError, match="trusted proxy"):
            networks([wrong])


@pytest.mark.parametrize(
    ("client", "given", "expected"),
    [
        ("10.0.0.1", "192.0.2.7", "192.0.2.7"),
        ("10.0.0.1", "1.1.1.1, 192.0.2.7:4711, 10.0.0.2", "192.0.2.7"),
        ("10.0.0.1", "[2001:db8::1]:80", "2001:db8::1"),
        ("10.0.0.1", "no address", None),
        ("10.0.0.1", "", None),
        ("192.0.2.9", "192.0.2.7", None),
    ],
)
def test_the_client_address_of_a_proxy(client, given, expected):
    scope = {"client": (client, 1), "headers": [(b"x-forwarded-for", given.encode())]}
    assert forwarded(scope, networks(["10.0.0.0/8"])) == expected


def test_connections_fit_the_limit_of_open_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 256), hard))
        assert descriptors(300) == 300 and resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 300
        assert descriptors(hard + 1) < hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- clients that are still sending ------------------------------------------------------------------------------

DIALECTS = {
    "/v1/chat/completions": openai,
    "/v1/messages": anthropic,
    "/api/chat": ollama,
    "/completion": llamacpp,
}


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_far_too_large_gets_an_answer(small, path, chunked):
    """The client reads only when it has sent everything, as most do; the sockets' buffers hold a part of that."""
    piece = b"x" * (MIB // 2)
    framed = b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece
    how = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % (24 * len(piece))
    with connect(small, "127.0.0.1") as connection:
        connection.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n\r\n" % (path.encode(), how))
        for _ in range(24):
            connection.sendall(framed)
        answer = b""
        while data := connection.recv(65536):
            answer += data
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 413 " in head and b"connection: close" in head.lower()
    DIALECTS[path](json.loads(body), 413)


def test_httpx_reads_the_answer_to_a_large_body(small):
    with httpx.Client(base_url=small.url) as http:
        for _ in range(3):
            response = http.post("/v1/completions", content=b"x" * (12 * MIB))
            assert response.status_code == 413 and "larger than" in response.json()["error"]["message"]


def test_a_client_that_never_ends_is_cut_off(small):
    piece = b"x" * MIB
    with connect(small, "127.0.0.1") as connection, pytest.raises(ConnectionError):
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n")
        for _ in range(200):
            connection.sendall(piece)


async def test_a_head_that_comes_before_the_last_answer_has_ended_keeps_the_connection():
    """A client that has all bytes of an answer may send its next head before the application has ended that answer,
    and the body in a separate packet."""
    head_is_here, handler = asyncio.Event(), None

    async def app(scope, receive, send):
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok", "more_body": True})
        if not body:
            while handler.cycle.scope is scope:  # the next head has not been parsed
                await asyncio.sleep(0.001)
        await send({"type": "http.response.body", "body": b""})
        head_is_here.set()

    loop = asyncio.get_running_loop()
    config = uvicorn.Config(app, lifespan="off", log_level="warning")
    config.load()
    kind = bounded_protocol(Connections(9, 9, ()), MIB, 15.0, 15.0, MIB)

    def make():
        nonlocal handler
        handler = kind(config=config, server_state=uvicorn.server.ServerState(), app_state={})
        return handler

    server = await loop.create_server(make, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n")
    await head_is_here.wait()
    writer.write(b"abc")
    assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
    writer.close()
    server.close()
    await server.wait_closed()
