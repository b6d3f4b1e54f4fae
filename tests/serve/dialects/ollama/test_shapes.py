"""Exchanges of Ollama's API as they go over the wire: a change of a shape is seen here."""

from __future__ import annotations

import json
import re

import httpx
import pytest

HELLO = [{"role": "user", "content": "hi"}]
OPTIONS = {"temperature": 0, "num_predict": 3}
ASKED = {
    "chat": ("/api/chat", {"messages": HELLO, "options": OPTIONS, "stream": False}),
    "chat_lines": ("/api/chat", {"messages": HELLO, "options": OPTIONS}),
    "chat_several": ("/api/chat", {"messages": HELLO, "options": {"num_predict": 1, "seed": 1}, "n": 2}),
    "chat_logprobs": ("/api/chat", {"messages": HELLO, "options": {**OPTIONS, "num_predict": 1}, "logprobs": True}),
    "generate": ("/api/generate", {"prompt": "hi", "options": OPTIONS, "stream": False}),
    "generate_lines": ("/api/generate", {"prompt": "hi", "raw": True, "options": {"num_predict": 2, "seed": 3}}),
    "load": ("/api/generate", {}),
    "embed": ("/api/embed", {"input": "", "truncate": False}),
    "show": ("/api/show", {}),
    "refused": ("/api/generate", {"prompt": "hi", "options": {"tfs_z": 0.5}}),
}


def steady(value: object, name: str = "") -> object:
    """The same in every run: times, digests and templates by their kind."""
    if isinstance(value, dict):
        return {key: steady(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [steady(item) for item in value]
    if name.endswith("_duration") and isinstance(value, int) and value >= 0:
        return "nanoseconds"
    if isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", value):
        return "time"
    return name if name in ("digest", "template") else value


@pytest.mark.parametrize("name", ASKED)
def test_exchanges(server, snapshot, name):
    path, body = ASKED[name]
    answer = httpx.post(server.url + path, json={"model": "fake", **body})
    lines = [steady(json.loads(line)) for line in answer.text.splitlines()]
    assert [answer.status_code, answer.headers["content-type"], *lines] == snapshot


def test_lists(server, snapshot):
    assert [steady(httpx.get(server.url + path).json()) for path in ("/api/tags", "/api/ps")] == snapshot
