"""Engines behind sockets: the same tokens, several clients, broken connections, and hostile peers of both ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import ssl
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvasir.engine import frames, host, hosted, remote_wire, streams
from kvasir.engine.fake import FakeEngine
from kvasir.engine.frames import HEAD
from kvasir.engine.host import EngineHost
from kvasir.engine.remote import HostAddress, RemoteEngine
from kvasir.errors import (
    ConfigError,
    EngineDead,
    EngineLost,
    InvalidRequest,
    ModelFileError,
    ModelNotFound,
    PromptTooLong,
    QueueFull,
)
from kvasir.types import Delta, FinishReason, TokenLogprob
from tests.engine.hosting import Hosted
from tests.engine.test_process import collect, expected, until
from tests.sched.drive import request
from tests.serve.http.test_tls import make

FAKE: dict[str, Any] = {"vocab_size": 256, "num_blocks": 200, "max_rows": 16, "max_model_len": 512}
KEY = "a key of the tests' host"


@pytest.fixture
async def engine():
    engine = FakeEngine(**FAKE, step_seconds=0.001)
    await engine.start()
    yield engine
    await idle(engine)
    await engine.stop()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "s"


async def idle(engine) -> None:
    """Nothing is left in it."""

    async def empty() -> bool:
        stats = await engine.stats()
        return (stats.running, stats.waiting, stats.paused, stats.blocks_used) == (0, 0, 0, 0)

    async with asyncio.timeout(60):
        while not await empty():
            await asyncio.sleep(0.01)
    await engine.check()


def link_of(client: RemoteEngine) -> frames.FrameSocket:
    assert client._link
    return client._link


def reading(client: RemoteEngine) -> Any:
    return link_of(client)._writer.transport


@asynccontextmanager
async def hosting(engine, path, **more):
    host = EngineHost(engine, **more)
    await host.listen_unix(path)
    try:
        yield host
    finally:
        await host.close()


@asynccontextmanager
async def client_of(path, **more):
    client = RemoteEngine(HostAddress(path), **more)
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


async def test_clients_share_an_engine_and_ids(engine, path):
    """Requests of different clients may have the same id; each gets its own tokens."""
    async with hosting(engine, path) as there:
        async with client_of(path) as a, client_of(path) as b, client_of(path) as c:
            asked = [
                [request(f"r{i}", [i, k], max_tokens=20, n=1 + i % 2, seed=k, temperature=1.0) for i in range(6)]
                for k in range(3)
            ]
            runs = [collect(e, one) for e, some in zip((a, b, c), asked, strict=True) for one in some]
            assert await asyncio.gather(*runs) == [expected(one) for some in asked for one in some]
            assert a.info == engine.info and there.num_clients == 3
            assert (await a.stats()).generated_tokens == (await engine.stats()).generated_tokens > 0
            assert await a.alive() and a.state.status == "ok" and not a.ended
            assert (await b.look()).answers == ()
        await until(lambda: not there.num_clients)


async def test_a_client_that_drops_frees_its_requests_alone(engine, path):
    async with hosting(engine, path), client_of(path) as stays:
        async with client_of(path) as drops:
            task = asyncio.create_task(collect(drops, request("x", [1], max_tokens=400, n=4), got := {}))
            kept = asyncio.create_task(collect(stays, asked := request("x", [2], max_tokens=300)))
            await until(lambda: got)
            link_of(drops).abort()
            with pytest.raises(EngineLost, match="broke") as found:
                await task
            assert (found.value.deaths, found.value.lives) == (0, 1)
        assert await kept == expected(asked)
        await idle(engine)


async def test_errors_keep_their_classes(engine, path):
    async with hosting(engine, path), client_of(path) as client:
        with pytest.raises(PromptTooLong) as found:
            await collect(client, request("a", [1] * 600))
        assert (found.value.tokens, found.value.context) == (600, 512)
        with pytest.raises(InvalidRequest, match="256"):
            await collect(client, request("b", [256]))
        with pytest.raises(ModelNotFound):
            await client.unload_adapter("nobody")
        with pytest.raises(ModelFileError, match="nowhere"):
            await client.load_adapter("x", "/nowhere")


async def test_a_full_client_is_refused(engine, path, monkeypatch):
    monkeypatch.setattr(hosted, "MAX_OPEN", 2)
    async with hosting(engine, path), client_of(path) as client:
        runs = [collect(client, request(f"r{i}", [1], max_tokens=50)) for i in range(3)]
        results = await asyncio.gather(*runs, return_exceptions=True)
        assert [type(r) for r in results] == [dict, dict, QueueFull]


async def test_results_of_many_steps_share_a_frame_when_the_client_is_behind(engine, path, monkeypatch):
    """And what is not read stays in the engine, however little the client's process reads."""
    monkeypatch.setattr(frames, "HIGH", 64)
    monkeypatch.setattr(hosted, "UNSENT", 64)
    monkeypatch.setattr(streams, "FULL", 100)
    sent, send = [], hosted.HostedClient._send

    def counted(self, message):
        sent.append(message)
        send(self, message)

    monkeypatch.setattr(hosted.HostedClient, "_send", counted)
    async with hosting(engine, path), client_of(path) as slow, client_of(path) as quick:
        reading(slow).pause_reading()
        asked = request("slow", [1, 2], max_tokens=500, ignore_eos=True)
        task = asyncio.create_task(collect(slow, asked))
        answer = await collect(quick, one := request("quick", [3], max_tokens=400))
        assert answer == expected(one)
        reading(slow).resume_reading()
        assert await task == expected(asked)
    steps = [m for m in sent if isinstance(m, remote_wire.Steps)]
    assert any(len(m.parts) > 1 for m in steps)


async def test_a_connection_is_made_again(engine, path):
    async with hosting(engine, path):
        client = RemoteEngine(HostAddress(path))
        await client.start()
        task = asyncio.create_task(collect(client, request("x", [1], max_tokens=500, ignore_eos=True), got := {}))
        await until(lambda: got)
    with pytest.raises(EngineDead):
        await task
    assert client.state.status == "restarting" and not client.ended and not await client.alive()
    with pytest.raises(EngineDead):
        await collect(client, request("x", [1]))
    os.unlink(path)
    async with hosting(engine, path):
        await until(lambda: client.state.status == "ok")
        assert await collect(client, asked := request("x", [1])) == expected(asked)
        await client.stop()
    assert client.ended


async def test_another_model_at_the_address_is_refused(engine, path):
    other = FakeEngine(**{**FAKE, "vocab_size": 300})
    await other.start()
    async with hosting(engine, path):
        client = RemoteEngine(HostAddress(path))
        await client.start()
    os.unlink(path)
    async with hosting(other, path):
        await until(lambda: "another model" in client.state.reason)
        with pytest.raises(EngineDead):
            await collect(client, request("x", [299]))
    await client.stop()
    await other.stop()


async def test_an_engine_that_does_not_last_ends_with_its_connection(engine, path):
    async with hosting(engine, path), client_of(path, lasts=False) as client:
        assert not client.ended
    assert client.ended and client.state.status == "ended"


async def test_a_host_that_closes_lets_requests_end(engine, path):
    async with hosting(engine, path) as there, client_of(path) as client:
        task = asyncio.create_task(collect(client, asked := request("x", [1], max_tokens=100), got := {}))
        await until(lambda: got)
        closing = asyncio.create_task(there.close(60.0))
        await asyncio.sleep(0)
        with pytest.raises(EngineDead, match="shutting down"):
            await collect(client, request("late", [1]))
        assert await task == expected(asked)
        await closing


async def test_nothing_answers(path):
    with pytest.raises(EngineDead, match="cannot be reached"):
        await RemoteEngine(HostAddress(path)).start()


# -- over TCP --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make certificates with")
async def test_tls_and_keys(engine, tmp_path):
    pair, other = make(tmp_path, "one"), make(tmp_path, "two")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    there = EngineHost(engine, KEY)
    address = HostAddress(None, "127.0.0.1", await there.listen_tcp("127.0.0.1", 0, context))
    trusting = ssl.create_default_context(cafile=pair.cert)
    client = RemoteEngine(address, KEY, trusting)
    await client.start()
    assert await collect(client, asked := request("x", [1], max_tokens=50)) == expected(asked)
    await client.stop()
    for key in ("", KEY + "!", KEY[:-1]):
        with pytest.raises(ConfigError, match="key"):
            await RemoteEngine(address, key, trusting).start()
    for wrong in (ssl.create_default_context(cafile=other.cert), None):
        with pytest.raises(EngineDead):
            await RemoteEngine(address, KEY, wrong).start()
    plain = HostAddress(None, "127.0.0.1", address.port, tls=False)
    with pytest.raises(EngineDead):
        await RemoteEngine(plain, KEY).start()
    await there.close()


async def test_a_host_on_the_network_needs_a_long_key(engine):
    for key in ("", "short"):
        with pytest.raises(ConfigError, match="key"):
            await EngineHost(engine, key).listen_tcp("127.0.0.1", 0, None)


@pytest.mark.parametrize(
    "text", ["", "http://a:1", "tls://a", "tls://a:99999", "unix://x/y", "tls://u@a:1", "tls://[:1"]
)
def test_addresses_that_are_none(text):
    with pytest.raises(ConfigError):
        HostAddress.parse(text)


@pytest.mark.parametrize("text", ["tls://a.b:1", "tcp://127.0.0.1:80", "tls://[::1]:7", "unix:/a/b"])
def test_addresses(text):
    assert str(HostAddress.parse(text)) == text


# -- hostile peers ---------------------------------------------------------------------------------------------

HELLO = remote_wire.encode(remote_wire.Hello(remote_wire.VERSION))
_ids = st.integers(-2, 300)
_messages = st.one_of(
    st.builds(remote_wire.Abort, _ids, st.none() | _ids),
    st.builds(remote_wire.Pause, _ids, st.booleans()),
    st.builds(remote_wire.Ask, _ids, st.sampled_from(["stats", "look", "pulse", "?", ""])),
    st.builds(remote_wire.UnloadAdapter, _ids, st.text()),
    st.builds(remote_wire.LoadAdapter, _ids, st.text(), st.text(), st.booleans(), st.booleans()),
    st.builds(remote_wire.Beat),
    st.builds(
        lambda handle, ids, n, seed: remote_wire.Submit(handle, request("x", ids, n=n, seed=seed, max_tokens=4)),
        _ids,
        st.lists(st.integers(-1, 2**40), max_size=5),
        st.integers(1, 3),
        st.none() | st.integers(0, 9),
    ),
)


def framed(body: bytes) -> bytes:
    return HEAD.pack(len(body)) + body


@st.composite
def hostile(draw) -> bytes:
    """Bytes that a client sends: frames, some damaged, cut off, or much too long by their heads."""
    bodies = draw(st.lists(st.one_of(st.binary(max_size=40), _messages.map(remote_wire.encode)), max_size=8))
    data = b"".join(framed(body) for body in ([HELLO] if draw(st.booleans()) else []) + bodies)
    match draw(st.sampled_from(["whole", "cut", "flipped", "endless"])):
        case "cut":
            data = data[: draw(st.integers(0, len(data)))]
        case "flipped" if data:
            at = draw(st.integers(0, len(data) - 1))
            data = data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]
        case "endless":
            data += HEAD.pack(2**32 - 1) + b"x"
    return data


@given(st.lists(hostile(), min_size=1, max_size=4))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_hostile_clients_cost_others_nothing(tmp_path_factory, sent):
    async def check() -> None:
        here = Hosted(FakeEngine(**FAKE))
        await here.start()
        for data in sent:
            reader, writer = await asyncio.open_unix_connection(here.address.path)
            writer.write(data)
            writer.write_eof()
            async with asyncio.timeout(30):
                await reader.read()  # until the host closes it
            writer.close()
        asked = request("x", [1, 2], max_tokens=6)
        assert await collect(here, asked) == expected(asked)
        await until(lambda: here.host.num_clients == 1)
        await idle(here)
        await here.stop()

    asyncio.run(check())


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=30, deadline=None)
def test_hostile_hosts_end_with_an_error(data, greets):
    """An error of the client's requests, and never another exception."""

    async def check() -> None:
        info = FakeEngine(**FAKE)
        await info.start()
        welcome = remote_wire.encode(remote_wire.Welcome(info.info, ("x",), ""))
        await info.stop()

        async def serve(reader, writer) -> None:
            writer.write((framed(welcome) if greets else b"") + data)
            writer.write_eof()
            await reader.read()
            writer.close()

        here = Hosted(info)
        path = here.address.path
        assert path
        server = await asyncio.start_unix_server(serve, path)
        client = RemoteEngine(here.address, lasts=False)
        try:
            await client.start()
            await collect(client, request("x", [1]))
        except (EngineDead, ConfigError):
            pass
        await client.stop()
        server.close()
        await asyncio.sleep(0.01)
        here._folder.cleanup()

    asyncio.run(check())


async def test_a_silent_or_slow_stranger_is_dropped(engine, path, monkeypatch):
    monkeypatch.setattr(host, "HELLO_SECONDS", 0.05)
    monkeypatch.setattr(host, "MAX_STRANGERS", 2)
    async with hosting(engine, path):
        reader, writer = await asyncio.open_unix_connection(path)
        with contextlib.suppress(OSError):
            for byte in framed(HELLO)[:-1]:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.005)
            assert await reader.read() == b""
        assert reader.at_eof() or reader.exception()
        writer.close()


async def test_a_client_without_beats_is_dropped(engine, path, monkeypatch):
    monkeypatch.setattr(remote_wire, "SILENT_SECONDS", 0.1)
    async with hosting(engine, path) as there:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(framed(HELLO))
        async with asyncio.timeout(30):
            await reader.read()
        writer.close()
        await until(lambda: not there.num_clients)


async def test_a_flood_of_queries_ends_the_connection(engine, path, monkeypatch):
    monkeypatch.setattr(hosted, "MAX_QUERIES", 3)
    async with hosting(engine, path):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(framed(HELLO) + b"".join(framed(remote_wire.encode(remote_wire.Ask(i, "look"))) for i in range(9)))
        async with asyncio.timeout(30):
            await reader.read()
        writer.close()


async def test_another_version_is_refused(engine, path, monkeypatch):
    async with hosting(engine, path):
        monkeypatch.setattr(remote_wire, "VERSION", 99)
        monkeypatch.setattr(remote_wire, "hello", msgspec.msgpack.Decoder(remote_wire.Hello))
        client = RemoteEngine(HostAddress(path))
        original = remote_wire.Hello
        monkeypatch.setattr(remote_wire, "Hello", lambda version, key: original(7, key))
        with pytest.raises(ConfigError, match="version"):
            await client.start()


# -- readers that are behind ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
async def test_a_reader_that_is_behind_gets_the_same_in_fewer_deltas(seed):
    """Each choice has its tokens in order, with their log-probabilities; its first delta is as it came."""
    random_ = random.Random(seed)
    asked = request("r", [1], n=2)
    came = {i: [random_delta(random_, i, 1.0 + step) for step in range(30)] for i in range(2)}
    came = {i: [d for d in some if not d.finish_reason] for i, some in came.items()}
    for i, some in came.items():
        some.append(Delta("r", i, (7,), finish_reason=FinishReason.LENGTH, at=99.0))
    queue = [replace(d, id="r") for i in random_.sample([0, 1], 2) for d in came[i]]

    def all_at_once(_) -> None:
        merging.deliver(queue)

    merging = streams.Streams(lambda *_: None, merges=True)
    got = [d async for d in merging.run(asked, all_at_once, lambda _: None)]
    for i, some in came.items():
        mine = [d for d in got if d.index == i]
        assert [t for d in mine for t in d.token_ids] == [t for d in some for t in d.token_ids]
        assert [x for d in mine for x in d.logprobs] == [x for d in some for x in d.logprobs]
        assert (mine[0].token_ids, mine[0].at) == (some[0].token_ids, some[0].at)
        assert sum(d.drafted for d in mine) == sum(d.drafted for d in some)
        assert [d.at for d in mine] == sorted(d.at for d in mine) and mine[-1].finish_reason is FinishReason.LENGTH
    assert len(got) < len(queue)


# -- the outbox ------------------------------------------------------------------------------------------------


def random_delta(random_: random.Random, index: int, at: float) -> Delta:
    kind = random_.randrange(6)
    if kind == 0:
        return Delta("", index, (1, 2), drafted=2, accepted=1, at=at)
    if kind == 1:
        return Delta("", index, (3,), (TokenLogprob(3, -0.5, 1, ((3, -0.5),)),), at=at)
    if kind == 2:
        return Delta("", index, (), finish_reason=FinishReason.LENGTH, at=at)
    return Delta("", index, (random_.randrange(2**31),), at=at)


@pytest.mark.parametrize("seed", range(20))
def test_the_outbox_keeps_the_order_of_each_choice(seed):
    """Whether or not the engine knows the time."""
    random_ = random.Random(seed)
    out, added = remote_wire.Outbox(), []
    for step in range(random_.randrange(1, 12)):
        for handle in range(1, 5):
            for index in range(2):
                if random_.random() < 0.7:
                    delta = random_delta(random_, index, 0.0 if seed % 2 else 1.0 + step)
                    out.add(handle, delta)
                    added.append((f"r{handle}", delta))
    body = remote_wire.encode(out.take())
    assert not out
    ids = {handle: f"r{handle}" for handle in range(1, 5)}
    got = [*remote_wire.deltas(frames.decoded(remote_wire.from_host, body), ids)]
    for name in ids.values():
        for index in range(2):
            mine = [d for d in got if (d.id, d.index) == (name, index)]
            theirs = [d for i, d in added if (i, d.index) == (name, index)]
            assert [(d.token_ids, d.logprobs, d.finish_reason, d.at, d.drafted) for d in mine] == [
                (d.token_ids, d.logprobs, d.finish_reason, d.at, d.drafted) for d in theirs
            ]
