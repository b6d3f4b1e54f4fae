"""`kvasir batch`: a file of requests without a server, also after its death."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from kvasir.cli import batch_job
from kvasir.cli.batch_job import BatchJob, pieces
from kvasir.data.checkpoint import Checkpoint
from kvasir.errors import EngineDead
from kvasir.serve.app import create_app
from kvasir.serve.hosting.catalogue import OneModel
from kvasir.serve.records.batches.call import Caller, CallResult
from kvasir.serve.settings import ServeSettings
from tests.cli.running import environment, run
from tests.cli.test_replica import command
from tests.serve.fakes import POISON
from tests.serve.running import client, make_front

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def line(id: str, url: str = TEXT, **body) -> dict:
    return {"custom_id": id, "method": "POST", "url": url, "body": {"prompt": id, "max_tokens": 3} | body}


def as_file(*lines: dict | bytes) -> io.BytesIO:
    return io.BytesIO(b"\n".join(one if isinstance(one, bytes) else json.dumps(one).encode() for one in lines))


async def answered(file: io.BytesIO, folder: Path, front=None, identity: str = "model", post=None):
    """The job, how many requests it made, and its output."""
    async with client(ServeSettings(max_body=10_000), front or make_front()) as http:
        catalogue = OneModel(front, http.app.state.catalogue.settings) if front else http.app.state.catalogue
        caller, asked = Caller(create_app(catalogue)), []
        real = post or caller.post

        async def noted(path, body, key, id):
            asked.append(path)
            return await real(path, body, key, id)

        caller.post = noted  # type: ignore[method-assign]
        kept = Checkpoint(folder / "kept")
        finished: list[None] = []
        job = BatchJob(catalogue, caller, kept, identity, None, lambda: finished.append(None))
        try:
            await job.run(file)
            job.write(file, folder / "out.jsonl")
        finally:
            kept.close()
        output = [json.loads(text) for text in (folder / "out.jsonl").read_text().splitlines()]
        assert len(finished) == len(output) == job.completed + job.failed
        return job, len(asked), output


async def test_lines_are_answered_in_order_and_only_once(tmp_path):
    file = as_file(*(line(f"c{i}", max_tokens=1 + i % 7) for i in range(40)), b"", line("chat", CHAT, messages=[]))
    job, asked, first = await answered(file, tmp_path)
    assert [one["custom_id"] for one in first] == [*(f"c{i}" for i in range(40)), "chat"]
    assert (job.completed, job.failed, job.broken, asked) == (40, 1, 0, 41)
    for i, one in enumerate(first[:40]):
        assert one["response"]["body"]["usage"]["completion_tokens"] == 1 + i % 7
    job, asked, again = await answered(file, tmp_path)
    assert (again, asked, job.kept) == (first, 0, 41), "a second run asks nothing"
    more = as_file(line("new"), *(line(f"c{i}", max_tokens=1 + i % 7) for i in reversed(range(40))))
    job, asked, found = await answered(more, tmp_path)
    assert (asked, found[1:]) == (1, first[39::-1][0:40])
    job, asked, _ = await answered(file, tmp_path, identity="another model")
    assert asked == 41


BAD: list[tuple[bytes | dict, str, str]] = [
    (b"{", "invalid_json_line", ""),
    (b"\xff\xfe", "invalid_json_line", ""),
    (b"[" * 5000, "invalid_json_line", ""),
    (b"[]", "invalid_request", ""),
    (b'{"custom_id": 7}', "invalid_request", ""),
    (b"x" * 20_000, "line_too_long", ""),
    (line("get") | {"method": "GET"}, "invalid_request", "get"),
    (line("files", "/v1/files"), "invalid_url", "files"),
    (line("manage", "/fleet/restart"), "invalid_url", "manage"),
    (line("stream", stream=True), "invalid_request", "stream"),
    (line("same"), "duplicate_custom_id", "same"),
]


async def test_bad_lines_are_errors_of_their_own(tmp_path):
    good = [line("same"), line("model", model="other"), line("end")]
    job, asked, found = await answered(as_file(good[0], *(bad for bad, _, _ in BAD), *good[1:]), tmp_path)
    assert (asked, job.completed, job.failed, job.broken) == (3, 2, len(BAD) + 1, 0)
    for (bad, code, id), one in zip(BAD, found[1:], strict=False):
        assert (one["error"]["code"], one["custom_id"], one["response"]) == (code, id, None), bad
    assert found[-2]["response"]["status_code"] == 404 and found[-1]["response"]["status_code"] == 200


async def test_faults_of_the_server_are_tried_again_by_the_next_run(tmp_path):
    file = as_file(line("bad", prompt=POISON), line("good"))
    job, asked, found = await answered(file, tmp_path)
    assert [one["response"]["status_code"] for one in found] == [500, 200] and job.broken == 1
    job, asked, found = await answered(file, tmp_path)
    assert (asked, job.kept, job.broken) == (1, 1, 1)


async def test_a_busy_server_is_waited_for_and_an_ended_one_is_not(tmp_path):
    job, asked, _ = await answered(as_file(*(line(f"c{i}") for i in range(60))), tmp_path, make_front(max_waiting=2))
    assert (job.completed, job.failed) == (60, 0) and asked >= 60
    front = make_front()

    async def ends(path, body, key, id):
        await front.stop()
        return CallResult(503, {"retry-after": "1"}, b"{}")

    with pytest.raises(EngineDead):
        await answered(as_file(line("new")), tmp_path, front, post=ends)


def test_long_lines_take_little_memory():
    assert [len(one) for one in pieces(io.BytesIO(b"a\n" + b"b" * 100 + b"\nc"), 10)] == [2, 11, 1]
    assert "/v1/files" not in batch_job.ENDPOINTS


# -- the command ------------------------------------------------------------------------------------------------------

SMALL = ("--threads", "1", "--max-model-len", "256", "--num-blocks", "60", "--max-num-seqs", "2")


def questions(path: Path, count: int) -> None:
    with open(path, "w") as file:
        for i in range(count):
            talk = [{"role": "user", "content": f"What is {i} + {i + 7}?"}]
            body = {"model": "kvasir-mini", "messages": talk, "temperature": 0, "max_tokens": 40}
            file.write(json.dumps(line(f"c{i}", CHAT) | {"body": body}) + "\n")


def contents(path: Path) -> list[str]:
    found = [json.loads(text) for text in path.read_text().splitlines()]
    return [one["response"]["body"]["choices"][0]["message"]["content"] for one in found]


@pytest.mark.slow
def test_the_same_command_continues_after_a_kill(tmp_path):
    questions(tmp_path / "in.jsonl", 150)
    out, kept = tmp_path / "out.jsonl", tmp_path / "out.jsonl.checkpoint"
    batch = ("kvasir.cli", "batch", str(tmp_path / "in.jsonl"), "--model", "kvasir-mini", *SMALL)
    fleet = (*batch, "-o", str(out), "--replicas", "2")
    process = subprocess.Popen([sys.executable, "-m", *fleet], env=environment())
    try:
        while sum(path.read_bytes().count(b"\n") for path in kept.glob("*.jsonl")) < 10:
            assert process.poll() is None
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGSTOP)
        replicas = psutil.Process(process.pid).children(recursive=True)
        busy = run(*fleet)
        assert busy.returncode == 2 and "another run" in busy.stderr
    finally:
        process.kill()
        process.wait()
    assert not psutil.wait_procs(replicas, 60)[1] and not out.exists()
    before = sum(path.read_bytes().count(b"\n") for path in kept.glob("*.jsonl"))
    assert 10 <= before < 150, "it was killed in its midst"
    done = run(*fleet)
    assert done.returncode == 0, done.stderr
    assert f"150 lines completed, 0 failed ({before} lines by an earlier run)" in done.stderr
    assert not kept.exists() and not list(tmp_path.glob("*.part"))
    plain = run(*batch, "-o", str(tmp_path / "plain.jsonl"), "--quiet")
    assert (plain.returncode, plain.stderr) == (0, "")
    assert contents(out) == contents(tmp_path / "plain.jsonl")


@pytest.mark.slow
def test_engines_elsewhere_answer_the_lines_and_one_may_die(tmp_path):
    questions(tmp_path / "in.jsonl", 150)
    (tmp_path / "key").write_text("a key of sufficient length\n")
    (tmp_path / "key").chmod(0o600)
    key, kept = ("--replica-key", str(tmp_path / "key")), tmp_path / "out.jsonl.checkpoint"
    with ExitStack() as stack:
        there = [stack.enter_context(command("replica", "kvasir-mini", *SMALL, *key, "--port", "0")) for _ in range(2)]
        addresses = [option for _, address in there for option in ("--replica", address)]
        asked = ("kvasir.cli", "batch", str(tmp_path / "in.jsonl"), "-m", "kvasir-mini", "-o")
        line = [sys.executable, "-m", *asked, str(tmp_path / "out.jsonl"), *addresses, *key]
        process = stack.enter_context(subprocess.Popen(line, env=environment()))
        while sum(path.read_bytes().count(b"\n") for path in kept.glob("*.jsonl")) < 10:
            assert process.poll() is None
            time.sleep(0.02)
        os.kill(there[0][0].pid, signal.SIGKILL)
        assert process.wait(300) == 0
    assert run(*asked, str(tmp_path / "plain.jsonl"), *SMALL).returncode == 0
    assert contents(tmp_path / "out.jsonl") == contents(tmp_path / "plain.jsonl")


@pytest.mark.slow
def test_a_missing_file_and_model_are_named(tmp_path):
    asked = run("kvasir.cli", "batch", str(tmp_path / "none"), "--model", "kvasir-mini", "-o", str(tmp_path / "out"))
    assert asked.returncode == 2 and "No such file" in asked.stderr
    (tmp_path / "in.jsonl").write_text("\n")
    asked = run("kvasir.cli", "batch", str(tmp_path / "in.jsonl"), "-m", "no-such-model", "-o", str(tmp_path / "out"))
    assert asked.returncode == 2 and "no-such-model" in asked.stderr
