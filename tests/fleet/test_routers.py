"""Two servers in front of one replica: one is killed under streams of several dialects, which continue at the other."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import httpx
import psutil
import pytest

from tests.cli.test_replica import command, key  # noqa: F401
from tests.serve.dialects.table import LENGTH, PATHS, SEED, TEMPERATURE, Row
from tests.serve.dialects.test_continued import ASKED, by_choice, events_of, id_of, plain
from tests.serve.workers.running import until

SMALL = ("kvasir-mini", "--threads", "1", "--num-blocks", "200")
DIALECTS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/api/chat", "/api/generate")
TEXT = "Tell me a long story about a dragon."


def body_of(row: Row, **common) -> dict:
    body = row.request(TEXT, True, **{LENGTH: 120, TEMPERATURE: 1.0, **common})
    named = {"model": "kvasir-mini"} | ({"stream": True} if row.path.startswith("/api") else {})
    return {**body, **named}


def received(url: str, row: Row, body: dict, headers: dict, begun: threading.Event) -> tuple[list[str], bool]:
    """The complete events of a stream, and whether its connection held. begun: set after a few of them."""
    data, whole = "", True
    try:
        with httpx.stream("POST", url + row.path, json=body, headers=headers, timeout=300, trust_env=False) as response:
            if response.status_code != 200:
                raise AssertionError(response.read())
            for piece in response.iter_text():
                data += piece
                if data.count('"') > 400:
                    begun.set()
    except httpx.TransportError:
        whole = False
        end = "\n" if row.path.startswith("/api") else "\n\n"
        data = data[: data.rindex(end) + len(end)] if end in data else ""
    finally:
        begun.set()
    assert "error" not in data, data[-500:]
    events = events_of(data)
    assert not events or finished(events) or not whole, "a stream that ended early without a broken connection"
    return events, whole


def stream(url: str, row: Row, body: dict, headers: dict) -> list[str]:
    """The events of a stream whose connection must hold."""
    events, whole = received(url, row, body, headers, threading.Event())
    assert whole, "the connection broke"
    return events


def cut_short(url: str, pid: int, bodies: list[tuple[Row, dict]]) -> list[list[str]]:
    """What each stream received before the server was killed: nothing, some or all."""
    begun = threading.Event()
    with ThreadPoolExecutor(len(bodies)) as pool:
        work = [pool.submit(received, url, *one, ASKED, begun) for one in bodies]
        assert begun.wait(120)
        os.kill(pid, signal.SIGKILL)
        return [one.result()[0] for one in work]


def finished(events: list[str]) -> bool:
    return bool(events) and any(mark in events[-1] for mark in ("[DONE]", "message_stop", '"done":true'))


def after(events: list[str]) -> dict[str, str]:
    """The headers that ask for the rest."""
    return {"Last-Event-ID": id_of(events[-1])} if events else ASKED


@pytest.mark.slow
def test_streams_of_a_router_that_is_killed_continue_at_another(key):  # noqa: F811
    with ExitStack() as stack:
        _, replica = stack.enter_context(command("replica", *SMALL, "--replica-key", key, "--port", "0"))
        front = ("serve", "kvasir-mini", "--port", "0", "--replica", replica, "--replica-key", key)
        routers = [stack.enter_context(command(*front)) for _ in range(3)]
        cut = 0
        for (process, url), (_, other) in itertools.pairwise(routers):
            bodies = [(PATHS[path], body_of(PATHS[path])) for path in DIALECTS for _ in range(2)]
            for (row, body), first in zip(bodies, cut_short(url, process.pid, bodies), strict=True):
                cut += not finished(first)
                rest = stream(other, row, body, after(first))
                whole, last = plain(first + rest), id_of((first + rest)[-1])
                seeded = body_of(row, **{SEED: int(last.split(".")[2], 16)})
                wanted = plain(stream(other, row, seeded, {}))
                assert row.read(whole, True).text == row.read(wanted, True).text, (row.path, last)
        assert cut > len(DIALECTS), "streams that were cut"
        metrics = httpx.get(f"{other}/metrics").text
        assert 'kvasir_http_streams_continued_total{outcome="continued"}' in metrics


def api_workers(server: int) -> list[psutil.Process]:
    """The processes of a server's API workers."""
    found = []
    for child in psutil.Process(server).children():
        with suppress(psutil.NoSuchProcess):
            found += [child] if "api_worker" in " ".join(child.cmdline()) else []
    return found


def continued(url: str, row: Row, body: dict, first: list[str]) -> list[str]:
    """All events of a stream. Asks for the rest until a connection holds: a worker that dies may take the next ones."""
    events = first

    def held() -> bool:
        nonlocal events
        rest, whole = received(url, row, body, after(events), threading.Event())
        events = events + rest
        return whole

    until(held, 120)
    assert finished(events), "the connection held and the stream did not end"
    return events


@pytest.mark.slow
def test_streams_of_an_api_worker_that_is_killed_continue_at_another():
    serve = ("serve", *SMALL, "--port", "0", "--api-workers", "2")
    with command(*serve) as (process, url):
        rows = [(PATHS[path], body_of(PATHS[path], **{SEED: 3})) for path in DIALECTS]
        whole = [stream(url, row, body, {}) for row, body in rows]
        cut = False
        for _ in range(5):  # the system chooses the worker of each stream: they may all be at the other one
            until(lambda: api_workers(process.pid))
            firsts = cut_short(url, api_workers(process.pid)[0].pid, rows * 3)
            for (row, body), first, one in zip(rows * 3, firsts, whole * 3, strict=True):
                got = continued(url, row, body, first)
                assert row.read(plain(got), True).text == row.read(plain(one), True).text, row.path
            if cut := not all(map(finished, firsts)):
                break
        assert cut, "streams that were cut"


@pytest.mark.slow
def test_streams_of_several_choices_continue_at_another(key):  # noqa: F811
    common = {"model": "kvasir-mini", "n": 3, "max_tokens": 60, "temperature": 1.0, "stream": True, "ignore_eos": True}
    bodies = {
        "/v1/completions": {**common, "prompt": TEXT, "stop": [" the"]},
        "/v1/chat/completions": {**common, "messages": [{"role": "user", "content": TEXT}]},
    }
    with ExitStack() as stack:
        _, replica = stack.enter_context(command("replica", *SMALL, "--replica-key", key, "--port", "0"))
        front = ("serve", "kvasir-mini", "--port", "0", "--replica", replica, "--replica-key", key)
        one, other = (stack.enter_context(command(*front))[1] for _ in range(2))
        for path, body in bodies.items():
            whole = events_of(httpx.post(one + path, json=body, headers=ASKED, timeout=300).text)
            assert len(whole) > 9 and set(by_choice(whole)[0]) == {0, 1, 2}
            for count in (1, len(whole) // 3, len(whole) // 2, len(whole) - 2):
                headers = {"Last-Event-ID": id_of(whole[count - 1])}
                rest = events_of(httpx.post(other + path, json=body, headers=headers, timeout=300).text)
                assert by_choice(whole[:count] + rest) == by_choice(whole), (path, count)
