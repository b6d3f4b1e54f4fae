"""What is done to a server on purpose. Each function returns when the harm was survived, and raises when it was not.

What it returns is whether the harm was seen to have its effect: a stream that was refused cannot be left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import httpx
import psutil

from tests.soak.client import Client, Refused
from tests.soak.server import BATCH, FREE, LIMITED, MANAGER, MAX_WAITING, STREAM_IDLE_TIMEOUT
from tests.soak.work import ADAPTERS, MODEL, STORY, Choice, Question, streamed

Harm = tuple[Callable[[Client], Awaitable[bool]], float]
LONG = {"model": MODEL, "prompt": STORY, "max_tokens": 300, "ignore_eos": True}

# Some megabytes, more than the buffers of a connection hold.
UNREAD = LONG | {"n": 4, "max_tokens": 250, "logprobs": 20, "temperature": 0.7, "seed": 5, "stream": True}


async def leave_stream(c: Client) -> bool:
    """The client goes after a few chunks."""
    body, left = LONG | {"stream": True, "n": c.rng.choice((1, 3))}, c.rng.randint(1, 30)
    async with c.http.stream("POST", f"{c.server.base}/v1/completions", json=body, headers=_auth(), timeout=300) as r:
        async for _ in r.aiter_lines():
            left -= 1
            if left == 0:
                return True
    return False


async def leave_whole(c: Client) -> bool:
    """The client goes before there is an answer."""
    try:
        async with asyncio.timeout(c.rng.uniform(0.0, 1.0)):
            await c.http.post(f"{c.server.base}/v1/completions", json=LONG | {"n": 2}, headers=_auth(), timeout=300)
    except TimeoutError:
        return True
    return False


async def read_slowly(c: Client) -> bool:
    """A client with a small buffer that takes its answer in sips; it must be whole and right all the same."""
    questions = [(q, a) for q, a in c.plain if q.route == "/v1/completions"]
    question, expected = c.rng.choice(questions)
    kills = c.server.kills
    async with _connection(c, buffer=4096) as (reader, writer):
        writer.write(_request(question.route, json.dumps(question.body | {"stream": True}).encode()))
        await writer.drain()
        found = await _answer(c, reader, kills, sips=12)
    assert found in (None, expected), "a slow reader got another answer"
    return found is not None


async def stop_reading(c: Client) -> bool:
    """A client that takes nothing until its request is paused, and then all; what it reads must be right."""
    kills, before = c.server.kills, await c.server.metrics()
    async with _connection(c, buffer=4096) as (reader, writer):
        writer.write(_request("/v1/completions", json.dumps(UNREAD).encode()))
        await writer.drain()
        since = time.monotonic()
        paused = await _rises(c, "answer_pauses_total", before, c.tally.patience / 4)
        unread = time.monotonic() - since
        try:
            found = await _answer(c, reader, kills)
        except (asyncio.IncompleteReadError, ConnectionError):
            if unread < STREAM_IDLE_TIMEOUT:
                raise
            return False  # on a busy machine we came too late
    try:
        expected = await c.post("/v1/completions", UNREAD)
    except Refused as error:
        c.excuse(error, kills)
        return False
    assert found in (None, expected), "a client that stopped reading got another answer"
    return paused and found is not None


async def _answer(c: Client, reader: asyncio.StreamReader, kills: int, sips: int = 0) -> dict[int, Choice] | None:
    """A streamed answer; None where it was refused for a good reason. kills: those when it was asked."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), c.tally.patience)
    if b" 200 " not in head.split(b"\r\n")[0]:
        assert (b" 503 " in head and c.server.kills >= kills + 2) or b" 429 " in head, head
        return None
    body = await _sip(reader, sips)
    lines = [line for line in body.decode().splitlines() if line.startswith("data: ")]
    if any('"engine_unavailable"' in line for line in lines) and c.server.kills >= kills + 2:
        return None
    return await streamed(_each(lines))


async def _sip(reader: asyncio.StreamReader, sips: int) -> bytes:
    """A chunked body, of which the first chunks are taken slowly."""
    body = b""
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
        sips -= 1
        await asyncio.sleep(0.2 if sips > 0 else 0)
    return body


async def never_read(c: Client) -> bool:
    """A client that takes nothing, ever: its request is paused, and after the idle timeout it is let go."""
    before = await c.server.metrics()
    async with _connection(c, buffer=4096) as (_, writer):
        writer.write(_request("/v1/completions", json.dumps(UNREAD).encode()))
        await writer.drain()
        paused = await _rises(c, "answer_pauses_total", before, c.tally.patience / 3)
        stalled = await _rises(c, "http_stalled_total", before, c.tally.patience / 2)
        return paused and stalled


async def _rises(c: Client, name: str, before: dict[str, float], seconds: float) -> bool:
    """Whether a counter of the server does so in time."""
    with contextlib.suppress(TimeoutError, httpx.HTTPError):
        async with asyncio.timeout(seconds):
            while (await c.server.metrics()).get(name, 0.0) <= before.get(name, 0.0):
                await asyncio.sleep(0.2)
            return True
    return False


async def _each(lines):
    for line in lines:
        yield line


async def malform(c: Client) -> bool:
    """Bodies that are no JSON, no requests, or ask for what cannot be."""
    bad = (
        b"{", b"[]", b"null", b'{"prompt": 1e999}', b"\xff\xfe{}", b"[" * 5000, b'{"a":' * 200 + b"1" + b"}" * 200,
        *(json.dumps(LONG | wrong).encode() for wrong in (
            {"n": 0}, {"n": -1}, {"max_tokens": -5}, {"temperature": "hot"}, {"nonsense": 1}, {"logprobs": 10**9},
            {"stop": [""] * 500}, {"seed": 2**70}, {"prompt": []}, {"prompt": [-1]}, {"prompt": [10**9]},
            {"logit_bias": {"99999999": 1}}, {"deadline": -1}, {"service_class": "royal"}, {"cache_salt": ""},
            {"top_p": 7}, {"prompt_logprobs": 1, "stream": True},
        )),
    )  # fmt: skip
    body = c.rng.choice(bad)
    headers = _auth() | {"content-type": "application/json"}
    response = await c.http.post(f"{c.server.base}/v1/completions", content=body, headers=headers, timeout=300)
    assert response.status_code == 400, f"{response.status_code} for {body[:200]!r}: {response.text[:300]}"
    return True


async def ask_unknown(c: Client) -> bool:
    """A model that is not there, a key that is none, a class above the key, a route that is none."""
    kind = c.rng.randrange(4)
    if kind == 0:
        return await c.refused(LONG | {"model": "nobody"}, 404)
    if kind == 1:
        return await c.refused(LONG, 401, key="not-a-key")
    if kind == 2:
        return await c.refused(LONG | {"service_class": "interactive"}, 403, key=BATCH)
    response = await c.http.post(f"{c.server.base}/v1/nothing", json={}, headers=_auth(), timeout=300)
    assert response.status_code == 404, response.status_code
    return True


async def oversize_prompt(c: Client) -> bool:
    """More than the context holds, for all routes."""
    text = STORY * c.rng.randint(20, 200)
    if c.rng.random() < 0.5:
        return await c.refused({"model": MODEL, "prompt": text}, 400)
    return await c.refused({"model": MODEL, "input": text}, 400, route="/v1/embeddings")


async def hostile_text(c: Client) -> bool:
    """Megabytes that the tokenizer must not be given, or must be freed of: refused, or left early."""
    body = {"model": MODEL, "prompt": c.rng.choice(["a", "\u202e", " \u00e9", "<|", "\n "]) * (2 << 20)}
    if c.rng.random() < 0.5:
        return await c.refused(body, 400)
    with contextlib.suppress(httpx.TimeoutException):
        await c.http.post(f"{c.server.base}/tokenize", json=body, headers=_auth(), timeout=0.3)
    return True


async def oversize_body(c: Client) -> bool:
    """17 MiB, declared and then sent without end."""
    return await _refusal(c, _head("/v1/completions", 17 << 20) + b" " * 100_000, b" 413 ")


async def oversize_headers(c: Client) -> bool:
    """Too many, too long, or without an end."""
    filler = c.rng.choice((b"x-a: b\r\n" * 300, b"x-a: " + b"b" * 60_000 + b"\r\n"))
    many = await _refusal(c, _head("/v1/completions", 2)[:-2] + filler + b"\r\n{}", b" 431 ", b" 400 ")
    return many & await _refusal(c, b"POST /v1/completions HTTP/1.1\r\nx: " + b"y" * 200_000, b" 400 ", b" 431 ")


async def break_protocol(c: Client) -> bool:
    """What is no HTTP."""
    noise = c.rng.choice(
        (b"\x16\x03\x01\x02" + c.rng.randbytes(64), b"GET / HTTP/9.9\r\n\r\n", b"\r\n\r\nHELO\r\n\r\n")
    )
    return await _refusal(c, noise, b" 400 ")


async def half_body(c: Client) -> bool:
    """The client disconnects in the middle of its request."""
    async with _connection(c) as (_, writer):
        writer.write(_head("/v1/completions", 5000) + b'{"model": "')
        await writer.drain()
        await asyncio.sleep(c.rng.uniform(0, 0.3))
    return True


async def miss_deadline(c: Client) -> bool:
    """More than can be computed in the time given; what was not begun is a 408, what was ends with an event."""
    body = LONG | {"deadline": c.rng.choice((0.001, 0.05)), "n": 4, "stream": c.rng.random() < 0.5}
    return await c.refused(body, "deadline_exceeded")


async def exceed_limit(c: Client) -> bool:
    """Four requests at once of a key that may have two: at least one 429, which says when to come back."""
    body = LONG | {"max_tokens": 60}
    results = await asyncio.gather(
        *(c.post("/v1/completions", body, LIMITED) for _ in range(4)), return_exceptions=True
    )
    refusals = [r for r in results if isinstance(r, Refused) and r.status == 429]
    assert refusals and all("retry-after" in r.headers for r in refusals), results
    return any(r.code == "rate_limit_exceeded" for r in refusals)


async def fill_queue(c: Client) -> bool:
    """More requests at once than may wait, until one gets a 429; the clients disconnect after a while."""
    body = LONG | {"prompt": ["a", "b", "c", "d"] * 4, "n": 4}
    kills = c.server.kills
    tasks = [asyncio.create_task(c.post("/v1/completions", body)) for _ in range(2 + MAX_WAITING // 64)]
    await asyncio.wait(tasks, timeout=30, return_when=asyncio.FIRST_EXCEPTION)
    await asyncio.sleep(c.rng.uniform(0, 1))
    for task in tasks:
        task.cancel()
    refusals = [r for r in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(r, Refused)]
    for refusal in refusals:
        c.excuse(refusal, kills)
    return any(r.code == "queue_full" for r in refusals)


async def kill_engine(c: Client) -> bool:
    """The engine's process is gone from one moment to the next; afterwards all is as it was."""
    killed = await c.server.kill_engine()
    await asyncio.sleep(1.0)
    question: Question
    question, expected = c.rng.choice(c.plain)
    kills = c.server.kills
    try:
        assert await c.post(question.route, question.body) == expected, "another answer after a restart"
    except Refused as error:
        c.excuse(error, kills)
    return killed


async def stop_engine(c: Client) -> bool:
    """The engine's process stands still for a while."""
    return await c.server.stop_engine(c.rng.uniform(0.5, 3.0))


async def freeze_engine(c: Client) -> bool:
    """The engine's process stands still until the server replaces it."""
    return await c.server.freeze_engine(0.9 * c.tally.patience)


async def kill_starting(c: Client) -> bool:
    """The engine's process is killed, and the one after it while it starts."""
    return await c.server.kill_starting()


async def fill_disk(c: Client) -> bool:
    """The disk accepts no writes for a while: blocks are not stored, and no request is affected."""
    return await c.server.refuse_disk(c.rng.uniform(0.5, 3.0), c.tally.patience / 4)


async def change_adapter(c: Client) -> bool:
    """An adapter comes under a new name, gets the content of another, and goes; its answers are those of its content
    at the time."""
    name, kills = f"guest-{c.rng.randrange(1 << 30)}", c.server.kills
    asked = [(question, answer) for question, answer in c.plain if question.body["model"] in ADAPTERS]
    try:
        for question, expected in c.rng.sample(asked, 2):
            wire = {"lora_name": name, "lora_path": question.body["model"], "load_inplace": True}
            if not await _manage(c, "/v1/load_lora_adapter", wire):
                return False
            found = await c.post(question.route, question.body | {"model": name})
            assert found == expected, f"{name} with the content of {question.body['model']} gives another answer"
    except Refused as error:
        c.excuse(error, kills)
        return False
    finally:
        gone = await _manage(c, "/v1/unload_lora_adapter", {"lora_name": name})
    return gone and await c.refused(LONG | {"model": name}, 404)


async def _manage(c: Client, route: str, body: dict) -> bool:
    """False where the engine was not there, or had not loaded what is unloaded."""
    headers = {"authorization": f"Bearer {MANAGER}"}
    response = await c.http.post(c.server.base + route, json=body, headers=headers, timeout=c.tally.patience)
    assert response.status_code in (200, 404, 503), f"{response.status_code}: {response.text[:300]}"
    return response.status_code == 200


async def set_clock(c: Client) -> bool:
    """The time of day jumps in both processes; it is used only for time stamps in responses."""
    shift = c.server.wall.jump(c.rng)
    await asyncio.sleep(2.0)  # the date in the headers is made anew every second
    headers = _auth() | {"connection": "close"}
    body = {"model": MODEL, "input": "what time is it?"}
    response = await c.http.post(f"{c.server.base}/v1/embeddings", json=body, headers=headers, timeout=300)
    reported = parsedate_to_datetime(response.headers["date"]).timestamp()
    try:
        engine = c.server.wall.seen_by(c.server.engine)
    except (AssertionError, psutil.Error, OSError):
        return False  # it is just being started
    return engine and abs(reported - time.time() - shift) < 600


# A harm and how often it is done, in relation to the others.
HARMS: dict[str, Harm] = {
    "client leaves a stream": (leave_stream, 4),
    "client leaves before the answer": (leave_whole, 4),
    "slow reader": (read_slowly, 3),
    "client stops reading": (stop_reading, 0.5),
    "client never reads": (never_read, 0.5),
    "malformed body": (malform, 4),
    "unknown model, key, class or route": (ask_unknown, 2),
    "prompt beyond the context": (oversize_prompt, 2),
    "megabytes to tokenize": (hostile_text, 1),
    "body beyond its bound": (oversize_body, 1),
    "headers beyond their bound": (oversize_headers, 1),
    "no HTTP": (break_protocol, 1),
    "half a body": (half_body, 1),
    "deadline that cannot be met": (miss_deadline, 2),
    "key above its limit": (exceed_limit, 1),
    "queue filled": (fill_queue, 0.5),
    "engine stopped for a while": (stop_engine, 0.3),
    "engine frozen": (freeze_engine, 0.1),
    "engine killed while it starts": (kill_starting, 0.1),
    "disk full": (fill_disk, 1),
    "adapter comes, changes and goes": (change_adapter, 3),
    "wall clock set": (set_clock, 2),
}


# -- raw connections ---------------------------------------------------------------------------------------------------


def _auth() -> dict[str, str]:
    return {"authorization": f"Bearer {FREE}"}


def _head(route: str, length: int) -> bytes:
    lines = (f"POST {route} HTTP/1.1", "host: localhost", f"authorization: Bearer {FREE}", f"content-length: {length}")
    return "\r\n".join((*lines, "content-type: application/json", "connection: close", "\r\n")).encode()


def _request(route: str, body: bytes) -> bytes:
    return _head(route, len(body)) + body


@contextlib.asynccontextmanager
async def _connection(c: Client, buffer: int = 0):
    """A connection of our own; `buffer`: bytes of the socket's and of the reader's."""
    place = urlsplit(c.server.base)
    connection = socket.socket()
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        # Linux makes a sender's buffer a multiple of the segments that its peer takes: of 64 KiB on a loopback.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (place.hostname, place.port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=buffer or 65536)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _refusal(c: Client, sent: bytes, *statuses: bytes) -> bool:
    """One of these statuses in the first line of the answer. False when the server closed without one that arrived."""
    async with _connection(c) as (reader, writer):
        line = b""
        with contextlib.suppress(ConnectionError):
            writer.write(sent)
            await writer.drain()
        with contextlib.suppress(ConnectionError):
            line = await asyncio.wait_for(reader.readline(), c.tally.patience)
        # A server that closes while we still send may take the answer with it.
        assert not line or any(s in line for s in statuses), f"{line!r}, expected {statuses}"
        return bool(line)
