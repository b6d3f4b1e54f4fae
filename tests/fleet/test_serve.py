"""`kvasir serve --replicas 2`: kills, restarts and scaling under streams of several dialects, over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.server import serving

SMALL = ("--max-model-len", "512", "--num-blocks", "64", "--no-overlap")
TALK = [{"role": "user", "content": "Tell me a long story about a dragon and a princess."}]
ASKED = {
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 90, "seed": 1, "temperature": 1.0, "n": 2}
    | {"return_token_ids": True},
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 90, "seed": 2, "temperature": 1.0},
    "/v1/messages": {"messages": TALK, "max_tokens": 90, "temperature": 0},
    "/api/generate": {"prompt": "Once upon a time", "raw": True, "options": {"num_predict": 90, "seed": 3}},
}


def streamed(base: str, path: str) -> list:
    """The events of a stream that say what was generated, without ids and times."""
    found, body = [], ASKED[path] | {"model": "kvasir-mini", "stream": True}
    if path == "/v1/completions":
        body["ignore_eos"] = True
    with httpx.stream("POST", base + path, json=body, timeout=120) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data.startswith("{"):
                event = json.loads(data)
                assert "error" not in event, event
                found += said(event)
    return found


def said(event: dict) -> list:
    for choice in event.get("choices", ()):
        text = choice.get("text", "") + (choice.get("delta", {}).get("content") or "")
        parts = [*text, *(choice.get("token_ids") or ()), choice["finish_reason"]]
        return [(choice["index"], part) for part in parts]
    delta = event.get("delta", {})
    text = delta.get("text", "") + event.get("response", "")
    return [*text, delta.get("stop_reason") or event.get("done")]


def comparable(found: list) -> list:
    """Choices one after the other, their ids after their texts; how these are cut into events does not matter."""
    real = [one for one in found if one not in (None, False) and one != (0, None) and one != (1, None)]
    return sorted(real, key=lambda one: (one[0], isinstance(one[1], int)) if isinstance(one, tuple) else (0, False))


def views(base: str) -> list[dict]:
    return httpx.get(f"{base}/fleet", timeout=60).json()["replicas"]


def ready(base: str) -> list[dict]:
    for _ in range(1200):
        found = views(base)
        if all(r["status"] == "ready" and r["pid"] for r in found):
            return found
        time.sleep(0.05)
    raise AssertionError(found)


@pytest.mark.slow
def test_kills_restarts_and_scaling_break_no_stream():
    with serving("kvasir-mini", "--replicas", "2", "--max-replicas", "3", *SMALL) as (base, _):
        plain = {path: comparable(streamed(base, path)) for path in ASKED}
        assert all(len(one) > 40 for one in plain.values()), plain

        def harm(step: int) -> None:
            time.sleep(0.05 * step)
            match step % 4:
                case 0 | 1:
                    os.kill(ready(base)[step % 2]["pid"], signal.SIGKILL)
                case 2:
                    assert httpx.post(f"{base}/fleet/restart", json={}, timeout=300).status_code == 200
                case 3:
                    for count in (3, 1, 2):
                        wire = {"replicas": count}
                        assert httpx.post(f"{base}/fleet/scale", json=wire, timeout=300).status_code == 200

        with ThreadPoolExecutor(20) as pool:
            for step in range(4):
                streams = [(path, pool.submit(streamed, base, path)) for path in ASKED for _ in range(4)]
                pool.submit(harm, step).result()
                for path, stream in streams:
                    assert comparable(stream.result()) == plain[path], (step, path)
                ready(base)
        assert httpx.get(f"{base}/health").json() == {"status": "ok"}
        metrics = httpx.get(f"{base}/metrics").text
        assert 'kvasir_replica_requests_total{model_name="kvasir-mini",replica="1"}' in metrics
        assert httpx.post(f"{base}/fleet/scale", json={"replicas": 9}).status_code == 400
        assert httpx.post(f"{base}/fleet/replicas/7/restart", json={}).status_code == 400
        command = [sys.executable, "-m", "kvasir.cli", "fleet", "status", "--url", base]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert shown.count("ready") == 2, shown
