"""On real sockets: clients that leave, clients that do not read, and the official client."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import defaultdict

import httpx
import pytest

import tests.serve.running
from kvasir.engine import streams
from kvasir.serve.server import bind
from kvasir.serve.settings import ServeSettings
from tests.later import openai
from tests.serve.running import Live, assert_idle, events, live

SLOW = {"step_seconds": 0.01}


@pytest.fixture(scope="module")
def slow():
    """A server whose answers take a while: 10 ms a token."""
    with live(**SLOW) as server:
        yield server


def running(server: Live) -> int:
    stats = server.ask(server.front.stats())
    return stats.running + stats.waiting


def wait_until(condition, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def post(server: Live, path: str, body: bytes, buffer: int | None = None) -> socket.socket:
    """An open connection with a request sent; `buffer`: bytes that it takes unread."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.settimeout(10)
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def small_bind(settings: ServeSettings) -> socket.socket:
    """A listener whose connections hold little that was not taken."""
    listener = bind(settings)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return listener


def read_events(connection: socket.socket) -> list[dict]:
    """The events of a stream, to its end."""
    events = []
    with connection, connection.makefile("rb") as file:
        while b"[DONE]" not in (line := file.readline()):
            assert line, "the stream breaks off"
            if line.startswith(b"data: "):
                events.append(json.loads(line[6:]))
    return events


LONG = b'{"prompt": ["ab", "cd"], "n": 2, "max_tokens": 400, "stream": %s}'


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_a_client_that_disconnects_ends_all_choices_of_its_prompts(slow, stream):
    aborted = slow.ask(slow.front.stats()).aborted
    connection = post(slow, "/v1/completions", LONG % stream)
    wait_until(lambda: running(slow) == 4)
    if stream == b"true":
        assert b"200 OK" in connection.recv(1000)
    connection.close()
    slow.ask(assert_idle(slow.front))
    assert slow.ask(slow.front.stats()).aborted == aborted + 4


def test_a_client_that_disconnects_during_an_embedding(slow):
    connection = post(slow, "/v1/embeddings", b'{"input": [%s]}' % b",".join([b'"abc"'] * 500))
    wait_until(lambda: running(slow) > 0)
    connection.close()
    slow.ask(assert_idle(slow.front))


def test_a_client_that_disconnects_before_the_first_token():
    with live(step_seconds=0.3) as server:
        for stream in (b"true", b"false"):
            connection = post(server, "/v1/completions", LONG % stream)
            wait_until(lambda: running(server) > 0)
            connection.close()
            server.ask(assert_idle(server.front))


def test_a_client_that_does_not_read_is_disconnected():
    settings = ServeSettings(port=0, write_time=0.5)
    with live(settings, max_model_len=8192, num_blocks=5000) as server:
        body = b'{"prompt": "ab", "n": 8, "max_tokens": 8000, "stream": true, "logprobs": 20}'
        connection = post(server, "/v1/completions", body, buffer=4096)
        wait_until(lambda: server.front.meter.finished["abort"], 60)
        server.ask(assert_idle(server.front))
        stats = server.ask(server.front.stats())
        assert stats.paused == 0 and stats.pauses >= 8
        assert "kvasir_http_stalled_total 1.0" in httpx.get(f"{server.url}/metrics").text
        connection.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("prompt", [b'"abc"', b'["abc", "abc"]'])
def test_clients_that_do_not_read_pause_and_resume(prompt, monkeypatch):
    """Their queues are bounded, others are answered, and what they read in the end is whole."""
    monkeypatch.setattr(streams, "FULL", 500)
    monkeypatch.setattr(streams, "LOW", 100)
    monkeypatch.setattr(tests.serve.running, "bind", small_bind)
    made: list[streams.Streams] = []
    monkeypatch.setattr("kvasir.engine.inproc.Streams", lambda pause: made.append(streams.Streams(pause)) or made[-1])
    settings = ServeSettings(port=0, write_time=0)
    with live(settings, max_model_len=500, num_blocks=400, max_rows=4) as server:
        body = b'{"prompt": %s, "max_tokens": 400, "stream": true, "logprobs": 20, "temperature": 0}' % prompt
        clients = [post(server, "/v1/completions", body, buffer=4096) for _ in range(3)]
        count = 3 * (1 + prompt.count(b","))
        [queues] = made

        def stand_still() -> bool:
            """Also the sockets' buffers are full, and the server's own."""
            before = dict(queues.unread)
            time.sleep(0.2)
            paused = server.ask(server.front.stats()).paused
            return paused == count == len(before) and before == queues.unread

        wait_until(stand_still, 60)
        assert all(100 < n < 1500 for n in queues.unread.values()), queues.unread
        quick = httpx.post(f"{server.url}/v1/completions", json={"prompt": "xy", "max_tokens": 4, "temperature": 0})
        assert quick.json()["choices"][0]["text"] == "xyxy"
        for client in clients:
            texts: dict[int, str] = defaultdict(str)
            for choice in (choice for event in read_events(client) for choice in event["choices"]):
                texts[choice["index"]] += choice["text"]
            assert list(texts.values()) == [("abc" * 200)[:400]] * (count // 3)


@pytest.mark.slow
def test_a_hundred_streams_with_random_cancels_leave_nothing():
    async def one(http: httpx.AsyncClient, i: int) -> str:
        rng = random.Random(i)
        body = {"prompt": f"prompt {i} ", "n": rng.randint(1, 2), "max_tokens": 30, "temperature": 0}
        leave = rng.randint(0, 20) if i % 3 == 0 else None
        text = ""
        async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                text += line + "\n"
                if leave is not None and text.count("data:") > leave:
                    return "left"
        answers = [c["choices"][0] for c in events(text)]
        whole = "".join(c["text"] for c in answers if c["index"] == 0)
        assert whole == (f"prompt {i} " * 10)[:30]
        return "read"

    async def all_of_them(url: str) -> list[str]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as http:
            return await asyncio.gather(*(one(http, i) for i in range(100)))

    with live(num_blocks=60, step_seconds=0.002) as server:
        results = asyncio.run(all_of_them(server.url))
        assert results.count("read") >= 66


def test_a_full_queue_states_when_to_retry():
    async def many(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            body = {"prompt": "ab", "max_tokens": 40, "stream": True}
            return await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(12)))

    with live(max_waiting=2, max_rows=2, step_seconds=0.01) as server:
        responses = asyncio.run(many(server.url))
        refused = [r for r in responses if r.status_code != 200]
        assert refused and len(refused) < 12
        for response in refused:
            assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["type"] == "rate_limit_error"


# -- the official client -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sdk(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


HI = [{"role": "user", "content": "hi"}]


def test_the_client_lists_models(sdk):
    assert [m.id for m in sdk.models.list()] == ["fake"]
    assert sdk.models.retrieve("fake").owned_by == "kvasir"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("other")


def test_the_client_chats(sdk):
    fields = {"model": "fake", "messages": HI, "temperature": 0, "max_completion_tokens": 8}
    whole = sdk.chat.completions.create(**fields, logprobs=True, top_logprobs=1)
    assert whole.choices[0].message.content == "user: hi"
    assert whole.choices[0].logprobs.content[0].top_logprobs[0].logprob == -1.0
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    with sdk.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "user: hi"
    again = chunks[-1].usage
    assert (again.prompt_tokens, again.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert again.prompt_tokens_details.cached_tokens == again.prompt_tokens - 1, "the same prompt again"
    with sdk.chat.completions.stream(**fields | {"max_completion_tokens": 20}, stop="\n") as stream:
        assert stream.get_final_completion().choices[0].message.content == "user: hi"


def test_the_client_completes(sdk):
    answer = sdk.completions.create(model="fake", prompt=["ab", "c"], temperature=0, max_tokens=3, logprobs=1)
    assert [c.text for c in answer.choices] == ["aba", "ccc"]
    assert answer.choices[0].logprobs.text_offset == [0, 1, 2]
    with sdk.completions.create(model="fake", prompt="ab", temperature=0, max_tokens=3, stream=True) as stream:
        assert "".join(c.choices[0].text for c in stream) == "aba"


def test_the_client_embeds(sdk):
    # The client asks for base64 by itself, and decodes it.
    assert sdk.embeddings.create(model="fake", input=["ab"]).data[0].embedding == [195.0, 2.0]
    assert sdk.embeddings.create(model="fake", input="ab", encoding_format="float").data[0].embedding[1] == 2.0


def test_the_client_understands_errors(sdk):
    with pytest.raises(openai.BadRequestError) as error:
        sdk.chat.completions.create(model="fake", messages=HI, temperature=-1)
    assert error.value.param == "temperature" and error.value.code == "invalid_value"
    with pytest.raises(openai.NotFoundError, match="gpt-x"):
        sdk.chat.completions.create(model="gpt-x", messages=HI)


def test_the_client_sees_an_error_in_mid_stream():
    def fault(plan):
        if plan.step >= 5:
            raise RuntimeError("secret")

    with (
        live(fault=fault) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as sdk,
    ):
        text = ""
        with (
            pytest.raises(openai.APIError, match="engine failed"),
            sdk.completions.create(model="fake", prompt="ab", temperature=0, max_tokens=50, stream=True) as stream,
        ):
            for chunk in stream:
                text += chunk.choices[0].text
                assert chunk.choices[0].finish_reason is None
        assert text.startswith("ab")


def test_the_client_brings_its_key():
    settings = ServeSettings(port=0, api_keys=("a-good-key",))
    with live(settings) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="a-good-key", max_retries=0) as sdk:
            assert len(list(sdk.models.list())) == 1
        bad = openai.OpenAI(base_url=f"{server.url}/v1", api_key="a-bad-key1", max_retries=0)
        with bad, pytest.raises(openai.AuthenticationError):
            bad.models.list()
