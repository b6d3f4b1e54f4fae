"""What the API process does about engines that hang, that are killed while they start, and that cannot start."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.engine.sockets import make_socket_path, remove_socket, remove_stale
from kvasir.engine.subprocess import ProcessEngine
from kvasir.engine.watchdog import BUSY_FACTOR, BUSY_STEPS, QUIET_STEPS, Use, Watchdog
from kvasir.errors import KvasirError
from tests.engine.test_process import FAKE, collect, expected, until
from tests.sched.drive import request

# -- the watchdog ------------------------------------------------------------------------------------------------------


@given(st.floats(0.5, 50), st.floats(0, 50))
def test_an_idle_process_times_out_after_the_floor_or_some_of_its_longest_steps(floor, longest):
    dog, seconds = Watchdog(floor, longest), 0.0
    while not dog.verdict:
        dog.tick(dog.pause, Use(1.0, 5))
        seconds += dog.pause
    assert abs(seconds - max(floor, QUIET_STEPS * longest)) <= 3 * dog.pause


@given(st.floats(0.5, 5), st.floats(0, 5))
def test_a_process_that_computes_is_given_far_more(floor, longest):
    dog, ticks = Watchdog(floor, longest), 0
    while not dog.verdict:
        ticks += 1
        dog.tick(dog.pause, Use(0.06 * ticks))
    assert abs(ticks * dog.pause - max(BUSY_FACTOR * floor, BUSY_STEPS * longest)) <= 3 * dog.pause


def test_time_in_which_this_process_or_the_machine_stood_still_does_not_count():
    dog = Watchdog(10.0)
    for _ in range(10):
        dog.tick(86400.0, Use())
    assert not dog.verdict and dog.idle <= 20 * dog.pause


def test_a_sign_of_life_begins_anew():
    dog = Watchdog(1.0)
    for _ in range(100):
        for _ in range(7):
            dog.tick(dog.pause, Use())
        assert not dog.verdict
        dog.heard()


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("busy", [True, False])
async def test_a_frozen_engine_is_killed_and_replaced(busy, caplog):
    engine = ProcessEngine(fake={**FAKE, "step_seconds": 0.01}, hang_seconds=1.0)
    await engine.start()
    asked = request("r", [1], max_tokens=60)
    if busy:
        task = asyncio.create_task(collect(engine, asked, got := {}))
        await until(lambda: got)
    os.kill(engine.pid, signal.SIGSTOP)
    async with asyncio.timeout(60):
        while await engine.alive(0.01):
            await asyncio.sleep(0.01)
    assert engine.state.status == "ok", "it is known to be frozen before it is killed"
    await until(lambda: engine.restarts == 1)
    if not busy:
        task = asyncio.create_task(collect(engine, asked))
    assert await asyncio.wait_for(task, 60) == expected(asked)
    assert "no progress" in caplog.text and engine.restarts == 1
    assert await engine.alive(30) and engine.state.status == "ok"
    await engine.stop()


@pytest.mark.slow
async def test_a_long_step_is_no_hang():
    engine = ProcessEngine(fake={**FAKE, "step_seconds": 1.0}, hang_seconds=2.0)
    await engine.start()
    task = asyncio.create_task(collect(engine, request("slow", [1], max_tokens=2)))
    await asyncio.sleep(0.2)
    assert await engine.alive(timeout=0.05)
    await task
    assert engine.restarts == 0
    await engine.stop()


async def kill_starting(engine, times: int) -> None:
    """Kills the engine, and its next lives while they start."""
    for _ in range(times):
        pid = engine.pid
        os.kill(pid, signal.SIGKILL)
        await until(lambda pid=pid: engine.pid != pid)


@pytest.mark.slow
async def test_an_engine_that_is_killed_while_it_starts_is_started_again_and_again(monkeypatch, caplog):
    monkeypatch.setattr("kvasir.engine.spawning.LONGEST_PAUSE", 0.05)
    engine = ProcessEngine(fake={**FAKE, "step_seconds": 0.005})
    await engine.start()
    asked = request("r", [1], max_tokens=90)
    task = asyncio.create_task(collect(engine, asked, got := {}))
    await until(lambda: got)
    with caplog.at_level(logging.INFO):
        await kill_starting(engine, 8)
        state = engine.state
    assert state.status in ("starting", "restarting") and state.attempts >= 7 and "status -9" in state.reason
    assert await asyncio.wait_for(task, 60) == expected(asked)
    assert "start" in caplog.text and "status -9" in caplog.text
    assert engine.restarts >= 1 and engine.state.status == "ok" and await engine.alive(30)
    await engine.stop()


async def test_an_engine_that_is_stopped_while_it_starts_again_is_replaced(monkeypatch):
    monkeypatch.setattr("kvasir.engine.subprocess.LOAD_FACTOR", 1)
    engine = ProcessEngine(fake=FAKE, hang_seconds=0.5)
    await engine.start()
    pid = engine.pid
    os.kill(pid, signal.SIGKILL)
    await until(lambda: engine.pid != pid)
    os.kill(engine.pid, signal.SIGSTOP)
    await until(lambda: engine.state.status == "ok")
    assert await engine.alive(30)
    await engine.stop()


@pytest.mark.parametrize("patient", [True, False])
async def test_a_kill_during_the_first_start(patient):
    engine = ProcessEngine(fake=FAKE, patient=patient)
    start = asyncio.create_task(engine.start())
    await until(lambda: engine.pid)
    os.kill(engine.pid, signal.SIGKILL)
    if not patient:
        with pytest.raises(KvasirError, match="status -9"):
            await start
        return
    await asyncio.wait_for(start, 60)
    assert await engine.alive(30)
    await engine.stop()


# -- leaks -------------------------------------------------------------------------------------------------------------

PARENT = """
import asyncio, sys
from kvasir.engine.subprocess import ProcessEngine
async def main():
    engine = ProcessEngine(fake={"step_seconds": 0.01})
    start = asyncio.ensure_future(engine.start())
    while not engine.pid and not start.done():
        await asyncio.sleep(0.001)
    if "early" not in sys.argv:
        await start
    print(engine.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_killed_parent_leaves_neither_process_nor_file(when):
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as folder:  # a socket's path has to be short
        leave_nothing(when, Path(folder))


def leave_nothing(when: str, tmp_path: Path) -> None:
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, when], env=env, stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(3000):
        if not psutil.pid_exists(pid) and not list(tmp_path.iterdir()):
            return
        time.sleep(0.01)
    raise AssertionError(f"left behind: {list(tmp_path.iterdir())}, process {psutil.pid_exists(pid)}")


def test_files_of_a_dead_process_are_removed_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale, others = tmp_path / f"kvasir-engine-{dead.pid}-abc", []
    for name in (f"kvasir-engine-{os.getpid()}-abc", "kvasir-engine-abc", f"kvasir-{dead.pid}"):
        (tmp_path / name).mkdir()
        others.append(tmp_path / name)
    link = tmp_path / f"kvasir-engine-{dead.pid}-link"
    link.symlink_to(others[1])
    stale.mkdir()
    (stale / "engine.sock").touch()
    remove_stale(tmp_path)
    assert not stale.exists() and all(path.exists() for path in (*others, link))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp/" + "a" * 90)  # too long for a socket
    path = make_socket_path()
    remove_socket(path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    path = make_socket_path()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    remove_socket(path)
    assert not path.parent.exists()
