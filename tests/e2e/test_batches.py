"""A batch on the bundled model, whose server is killed in its midst."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tests.e2e.server import serving
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


@pytest.mark.slow
def test_a_restarted_server_resumes_its_batches(tmp_path):
    folder = tmp_path / "kept"
    flags = ("--data-dir", str(folder), "--max-num-seqs", "2")
    lines = [{"custom_id": f"c{i}", "method": "POST", "url": CHAT, "body": body(i)} for i in range(COUNT)]
    with serving(MODEL, *flags) as (base, process):
        with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as api:
            file = api.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
            batch = api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            wait_until(lambda: len(done(folder)) >= 4, 60)
        engines = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        process.returncode = 0  # as it was meant to be
        psutil.wait_procs(engines, 30)
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
            assert output[i]["response"]["body"]["choices"][0]["message"]["content"] == direct
        assert not list(folder.glob("batch-lines/*"))
