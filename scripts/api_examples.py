"""Examples for docs/api.md: requests to the bundled model, and what it answered."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx

from kvasir import AsyncLLM
from kvasir.serve.app import create_app
from kvasir.serve.hosting.catalogue import OneModel
from kvasir.serve.settings import ServeSettings

MODEL = "kvasir-mini"
# ruff: noqa: E501 - a request a line
ASK = [{"role": "user", "content": "What is 23 + 45?"}]
SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
# Route -> body. All are greedy, so that the answers are the same on every machine.
EXAMPLES: dict[str, Any] = {
    "POST /v1/chat/completions": {"model": MODEL, "messages": ASK, "temperature": 0},
    "POST /v1/completions": {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0},
    "POST /v1/embeddings": {"model": MODEL, "input": "a text", "dimensions": 4},
    "POST /v1/responses": {"model": MODEL, "input": "What is 23 + 45?", "temperature": 0, "store": False},
    "GET /v1/models": None,
    "POST /v1/messages": {"model": MODEL, "max_tokens": 16, "messages": ASK, "temperature": 0},
    "POST /v1/messages/count_tokens": {"model": MODEL, "messages": ASK},
    "POST /api/generate": {"model": MODEL, "prompt": "Hello", "stream": False, "options": {"temperature": 0, "num_predict": 4}},
    "POST /api/chat": {"model": MODEL, "messages": ASK, "stream": False, "options": {"temperature": 0}},
    "POST /completion": {"prompt": "Once upon a time", "n_predict": 4, "temperature": 0, "response_fields": ["content", "stop_type"]},
    "POST /generate": {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 4}},
    "POST /sglang/generate": {"text": "Once upon a time", "sampling_params": {"temperature": 0, "max_new_tokens": 4}, "rid": "story"},
    "POST /tokenize": {"prompt": "Once upon a time"},
    "POST /detokenize": {"tokens": [1, 2, 3]},
    "GET /health": None,
    "GET /version": None,
}  # fmt: skip
# What differs from run to run, and what stands for it.
_FIXED = (
    (r'("(?:id|item_id|request_id)": "[a-z]+[_-])[\w-]+"', r'\g<1>123"'),
    (r'("(?:created|created_at|completed_at|started_at)": )[\d.]+', r"\g<1>1795000000"),
    (r'("(?:created_at|modified_at)": )"[^"]+"', r'\g<1>"2026-11-18T11:06:40Z"'),
    (r'("\w*_duration": )\d+', r"\g<1>10000000"),
    (r'("\w*_latency": )[\d.e-]+', r"\g<1>0.01"),
    (r'("seed": )\d+', r"\g<1>7"),
    (r'("system_fingerprint": )"[^"]+"', r'\g<1>"fp_0123456789"'),
)


def run() -> dict[str, str]:
    """Route -> the exchange as Markdown."""
    return asyncio.run(_exchanges())


async def _exchanges() -> dict[str, str]:
    async with AsyncLLM(MODEL, max_num_seqs=4, num_blocks=64, threads=1, speculate="off") as llm:
        app = create_app(OneModel(llm.front, ServeSettings()))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000") as client:
            return {route: await _exchange(client, route, body) for route, body in EXAMPLES.items()}


async def _exchange(client: httpx.AsyncClient, route: str, body: Any) -> str:
    method, path = route.split()
    answer = await client.request(method, path, json=body)
    assert answer.status_code == 200, (route, answer.text)
    asked = "" if body is None else f" -d '{json.dumps(body)}'"
    return f"```sh\ncurl http://127.0.0.1:8000{path}{asked}\n```\n\n{_shown(answer)}\n"


def _shown(answer: httpx.Response) -> str:
    text = json.dumps(answer.json(), indent=1) if answer.content else ""
    for pattern, fixed in _FIXED:
        text = re.sub(pattern, fixed, text)
    # Short lists and objects in one line.
    text = re.sub(
        r"[\[{]\s+([^\[\]{}]{1,70})\s+[\]}]",
        lambda m: re.sub(r"\s+", " ", m[0]).replace("[ ", "[").replace(" ]", "]").replace("{ ", "{").replace(" }", "}"),
        text,
    )
    return f"```json\n{text}\n```"
