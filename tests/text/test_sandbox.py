"""Workers: one more starts while another is busy, those too many leave, and none outlives its sandbox."""

from __future__ import annotations

import fcntl
import signal
import socket
import struct
import termios
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from kvasir.text import sandbox as module
from kvasir.text.sandbox import Sandbox, SandboxedProcess, SandboxLimit

SCRIPT = """
import json, struct, sys
def write(message):
    data = json.dumps(message).encode()
    sys.stdout.buffer.write(struct.pack("<I", len(data)) + data)
    sys.stdout.buffer.flush()
write({"ready": True})
while head := sys.stdin.buffer.read(4):
    write({"outcome": json.loads(sys.stdin.buffer.read(*struct.unpack("<I", head)))})
"""


def until(fact: Callable[[], bool]) -> None:
    for _ in range(2000):
        if fact():
            return
        time.sleep(0.005)
    raise AssertionError("it never came to be")


@pytest.fixture
def make(tmp_path):
    made = []

    def make(**options) -> Sandbox:
        (tmp_path / "script.py").write_text(SCRIPT)
        made.append(Sandbox(tmp_path / "script.py", "job", 20.0, 1 << 30, **options))
        return made[-1]

    yield make
    for sandbox in made:
        sandbox.close()


def held(sandbox: Sandbox, pool: ThreadPoolExecutor) -> tuple[SandboxedProcess, Future]:
    """A worker that stands still, and the job that waits for it."""
    sandbox.prewarm()
    worker = sandbox.idle[-1]
    worker.process.send_signal(signal.SIGSTOP)
    job = pool.submit(sandbox.run, {"number": 0})
    until(lambda: worker not in sandbox.idle and unread(worker.socket))
    return worker, job


def unread(connection: socket.socket) -> int:
    """Bytes, with what the system adds, that the other side has not read."""
    return struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]


def test_a_job_does_not_wait_for_another_and_the_worker_too_many_leaves(make):
    sandbox = make(max_workers=2, kept=1, patience=0.2)
    with ThreadPoolExecutor() as pool:
        first, slow = held(sandbox, pool)
        assert sandbox.run({"number": 1}) == {"outcome": {"number": 1}}
        (second,) = sandbox.idle
        first.process.send_signal(signal.SIGCONT)
        assert slow.result() == {"outcome": {"number": 0}}
        until(lambda: len(sandbox.idle) == 1)
        (kept,) = sandbox.idle
        gone = second if kept is first else first
        until(lambda: gone.process.poll() is not None)
        assert kept.process.poll() is None and sandbox.run({}) == {"outcome": {}}


def test_one_worker_alone_stays(make):
    sandbox = make(max_workers=2, kept=1, patience=0.0)
    sandbox.prewarm()
    sandbox.end_surplus()
    assert len(sandbox.idle) == 1 and sandbox.idle[0].process.poll() is None


def test_a_worker_that_works_when_its_sandbox_is_closed_ends_with_its_job(make):
    sandbox = make()
    with ThreadPoolExecutor() as pool:
        worker, job = held(sandbox, pool)
        sandbox.close()
        worker.process.send_signal(signal.SIGCONT)
        assert job.result() == {"outcome": {"number": 0}}
        until(lambda: worker.process.poll() is not None)
        assert not sandbox.idle
    assert sandbox.run({"late": 1}) == {"outcome": {"late": 1}} and len(sandbox.idle) == 1


def test_a_worker_that_ends_is_a_limit_and_the_next_job_has_another(make):
    sandbox = make()
    with ThreadPoolExecutor() as pool:
        worker, job = held(sandbox, pool)
        worker.process.kill()
        with pytest.raises(SandboxLimit, match="process"):
            job.result()
    assert sandbox.run({}) == {"outcome": {}}


@pytest.mark.parametrize("reply", ["[1]", "null", '"x"', "{", "\\xff", "[" * 100_000])
def test_a_reply_that_is_no_object_is_the_end_of_its_worker(make, tmp_path, reply):
    sandbox = make()
    outcome = f"""
    data = {reply!r}.encode("latin-1")
    sys.stdin.buffer.read(*struct.unpack("<I", head))
    sys.stdout.buffer.write(struct.pack("<I", len(data)) + data)
    sys.stdout.buffer.flush()
"""
    (tmp_path / "script.py").write_text(SCRIPT[: SCRIPT.index('    write({"outcome')] + outcome)
    sandbox.prewarm()
    (worker,) = sandbox.idle
    with pytest.raises(SandboxLimit, match="JSON object"):
        sandbox.run({})
    assert not sandbox.idle and worker.process.poll() is not None


def test_time_counts_only_while_the_processor_computes_for_the_job(tmp_path):
    """A worker that stands still for longer than its limit is as one on a machine under load."""
    (tmp_path / "script.py").write_text(SCRIPT)
    sandbox = Sandbox(tmp_path / "script.py", "job", 0.05, 1 << 30)
    try:
        with ThreadPoolExecutor() as pool:
            worker, job = held(sandbox, pool)
            time.sleep(0.2)
            worker.process.send_signal(signal.SIGCONT)
            assert job.result() == {"outcome": {"number": 0}}
    finally:
        sandbox.close()


LIMITED = """
import json, sys, time
settings = json.loads(sys.argv[1])
sys.path[:] = settings["path"]
from kvasir.text.template_worker import read_frame, write_frame
from kvasir.text.worker_limits import limit_resources, limited_time
limit_resources(settings["memory"])
write_frame(sys.stdout.buffer, {"ready": True})
while job := read_frame(sys.stdin.buffer):
    with limited_time(job["seconds"]):
        time.sleep(job["sleeps"])
        while job["loops"]:
            pass
    write_frame(sys.stdout.buffer, job)
"""


def test_a_job_that_computes_too_long_ends_itself_and_one_that_sleeps_does_not(tmp_path):
    (tmp_path / "script.py").write_text(LIMITED)
    sandbox = Sandbox(tmp_path / "script.py", "job", 0.1, 1 << 30)
    try:
        sleeps = {"seconds": 0.1, "sleeps": 0.3, "loops": False}
        assert sandbox.run(sleeps) == sleeps
        with pytest.raises(SandboxLimit, match=r"more than 0\.1 seconds"):
            sandbox.run({"seconds": 0.1, "sleeps": 0.0, "loops": True})
        assert not sandbox.idle
    finally:
        sandbox.close()


def test_a_worker_that_waits_forever_ends_at_the_far_limit(make, monkeypatch):
    monkeypatch.setattr(module, "far", lambda seconds: 0.2)
    sandbox = make()
    with ThreadPoolExecutor() as pool:
        _, job = held(sandbox, pool)
        with pytest.raises(SandboxLimit, match=r"did not end within 0\.2 seconds"):
            job.result()
    assert not sandbox.idle
