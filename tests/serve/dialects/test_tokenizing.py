"""What a server tokenizes for its clients: a long text ends with the connection of the client that sent it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from kvasir.engine import turns
from kvasir.engine.front import Front
from kvasir.text import tokenizer_process
from kvasir.text.tokenizer import Tokenizer
from tests.serve.fakes import EchoEngine, template
from tests.serve.running import live
from tests.text import hostile


def until(fact) -> None:
    for _ in range(4000):
        if fact():
            return
        time.sleep(0.005)
    raise AssertionError("it never came to be")


@contextmanager
def ended(tokenizer: Tokenizer) -> Iterator[None]:
    """Ends its processes, so that a test that fails leaves no job for the server to wait for."""
    try:
        yield
    finally:
        tokenizer.close()


def test_a_client_that_disconnects_ends_the_tokenization_of_its_text(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_process, "SECONDS", 300.0)
    monkeypatch.setattr(tokenizer_process, "MOST_SECONDS", 300.0)
    tokenizer = Tokenizer.from_folder(hostile.endless(tmp_path))
    front = Front(EchoEngine(), tokenizer, template())
    body = json.dumps({"prompt": hostile.HANGS * turns.LONG_BYTES}).encode()
    head = "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    under_way, run = [], turns.Turns.run

    async def noted(self, size, work):
        def begun(hold):
            under_way.append(hold)
            try:
                return work(hold)
            finally:
                under_way.remove(hold)

        return await run(self, size, begun)

    monkeypatch.setattr(turns.Turns, "run", noted)
    with live(front=front) as server, ended(tokenizer):
        host, port = server.url.removeprefix("http://").split(":")
        for _ in range(tokenizer_process.MAX_WORKERS):
            with socket.create_connection((host, int(port))) as client:
                client.sendall(head.encode() + body)
                until(lambda: under_way)
                time.sleep(0.1)
                assert under_way
            until(lambda: not under_way)
        short = httpx.post(f"{server.url}/tokenize", json={"prompt": "h"}, timeout=60)
        assert short.status_code == 200, "every place is free again"
