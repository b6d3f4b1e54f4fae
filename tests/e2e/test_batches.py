"""Batches on the bundled model, through OpenAI's SDK: processes of the server are killed in their midst."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.server import serving
from tests.fleet.test_serve import ready
from tests.later import openai
from tests.serve.http.test_streams import wait_until

MODEL = "kvasir-mini"
CHAT = "/v1/chat/completions"
COUNT = 40


def body(i: int) -> dict:
    ask = [{"role": "user", "content": f"What is {i} + {i + 7}?"}]
    return {"model": MODEL, "messages": ask, "temperature": 0, "max_tokens": 40}


def done(folder: Path) -> dict[str, str]:
    """Which lines are written down as done, and the id of the request that did each."""
    entries = [json.loads(text) for path in folder.glob("batch-lines/*") for text in path.read_text().splitlines(True)
               if text.endswith("\n")]  # fmt: skip
    return {entry["output"]["custom_id"]: entry["output"]["id"] for entry in entries}


def begin(api, count: int):
    """A batch of so many lines that has begun."""
    lines = [{"custom_id": f"c{i}", "method": "POST", "url": CHAT, "body": body(i)} for i in range(count)]
    file = api.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    return api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def kill(process) -> None:
    """Kills a server; its other processes end by themselves."""
    others = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    process.returncode = 0  # as it was meant to be
    assert not psutil.wait_procs(others, 60)[1]


def content(entry: dict) -> str:
    return entry["response"]["body"]["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_a_restarted_server_resumes_its_batches(tmp_path):
    folder = tmp_path / "kept"
    flags = ("--data-dir", str(folder), "--max-num-seqs", "2")
    with serving(MODEL, *flags) as (base, process):
        with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as api:
            batch = begin(api, COUNT)
            wait_until(lambda: len(done(folder)) >= 4, 60)
        kill(process)
    before = done(folder)
    assert 4 <= len(before) < COUNT, "it was killed in its midst"
    with serving(MODEL, *flags) as (base, _), openai.OpenAI(base_url=f"{base}/v1", api_key="none") as api:
        wait_until(lambda: api.batches.retrieve(batch.id).status == "completed", 120)
        batch = api.batches.retrieve(batch.id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (COUNT, 0)
        output = [json.loads(text) for text in api.files.content(batch.output_file_id).text.splitlines()]
        assert [entry["custom_id"] for entry in output] == [f"c{i}" for i in range(COUNT)]
        assert {e["custom_id"]: e["id"] for e in output if e["custom_id"] in before} == before, "none was done twice"
        for i in (0, COUNT // 2, COUNT - 1):
            direct = api.chat.completions.create(**body(i)).choices[0].message.content
            assert content(output[i]) == direct
        assert not list(folder.glob("batch-lines/*"))


@pytest.mark.slow
def test_a_batch_over_a_fleet_outlives_any_of_its_processes(tmp_path):
    """A replica, an API worker and then the whole server are killed; people are served meanwhile."""
    count, folder = 200, tmp_path / "kept"
    flags = ("--data-dir", str(folder), "--replicas", "2", "--api-workers", "2", "--max-num-seqs", "2")
    with serving(MODEL, *flags) as (base, process):
        with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=5) as api:
            batch = begin(api, count)
            wait_until(lambda: len(done(folder)) >= 8, 120)
            assert all(replica["routed"] for replica in ready(base)), "all replicas are busy"
            os.kill(ready(base)[0]["pid"], signal.SIGKILL)
            wait_until(lambda: len(done(folder)) >= 16, 120)
            api.chat.completions.create(**body(0))
            assert api.batches.retrieve(batch.id).status == "in_progress", "people do not wait for batches"
            [worker, _] = [p for p in psutil.Process(process.pid).children() if "kvasir.cli.api_worker" in p.cmdline()]
            worker.kill()
            wait_until(lambda: len(done(folder)) >= 24, 120)
        kill(process)
    before = done(folder)
    assert 24 <= len(before) < count, "it was killed in its midst"
    with serving(MODEL, *flags) as (base, _), openai.OpenAI(base_url=f"{base}/v1", api_key="none") as api:
        wait_until(lambda: api.batches.retrieve(batch.id).status == "completed", 300)
        batch = api.batches.retrieve(batch.id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (count, 0)
        output = [json.loads(text) for text in api.files.content(batch.output_file_id).text.splitlines()]
        assert [entry["custom_id"] for entry in output] == [f"c{i}" for i in range(count)]
        assert {e["custom_id"]: e["id"] for e in output if e["custom_id"] in before} == before, "none was done twice"
        assert 'kvasir_batch_lines_total{outcome="completed"}' in httpx.get(f"{base}/metrics", timeout=60).text
    with serving(MODEL) as (base, _), openai.OpenAI(base_url=f"{base}/v1", api_key="none") as api:
        plain = begin(api, count)
        wait_until(lambda: api.batches.retrieve(plain.id).status == "completed", 300)
        file = api.batches.retrieve(plain.id).output_file_id
        expected = [json.loads(text) for text in api.files.content(file).text.splitlines()]
        assert [*map(content, output)] == [*map(content, expected)], "answers equal those of one engine"
