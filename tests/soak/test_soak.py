"""A short soak, and the proof that it can fail."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.soak.client import Tally
from tests.soak.clock import jump_clock
from tests.soak.harm import HARMS
from tests.soak.server import EVENTS, NAMES, TIMER, Facts, Server, named_threads
from tests.soak.soak import JUMPS, KILL, idle, patience, slowness, soak
from tests.soak.wall import WallClock
from tests.soak.work import Choice, ErrorEvent, streamed


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("replicas", [1, 3])
def test_twenty_seconds_of_load_and_faults_leak_nothing(replicas):
    tally = asyncio.run(soak(20.0, seed=1, replicas=replicas))
    assert not tally.wrong, "\n".join(tally.wrong)
    assert tally.survived["of these, equal to the plain run"] > 20
    assert tally.survived["engine killed"] >= 1


DROPPED_ENTRY = """
from kvasir.engine.journal import Journal
add, calls = Journal.add, []
def dropping(self, request):
    add(self, request)
    calls.append(request.id)
    if len(calls) > 50 and len(calls) % 5 == 0:
        self.forget(request.id)
Journal.add = dropping
"""
LEAKED_BLOCK = """
from kvasir.kv.pool import BlockPool
release, calls = BlockPool.release, []
def leaking(self, ids):
    calls.append(0)
    release(self, list(ids)[1:] if len(calls) % 20 == 0 else ids)
BlockPool.release = leaking
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("plant", "message"),
    [(DROPPED_ENTRY, "lost: no end within its limit"), (LEAKED_BLOCK, r"block \d+ counts \d+ holders, \d+ hold it")],
)
def test_a_planted_fault_has_its_verdict_in_time(plant, message):
    begun = time.monotonic()
    tally = asyncio.run(soak(20.0, seed=1, plant=plant))
    assert re.search(message, "\n".join(tally.wrong)), tally.wrong[:5]
    assert time.monotonic() - begun < 500 * tally.slowness


async def test_a_stream_that_never_ends_counts_as_lost():
    """Also a stream that is kept alive by comments."""
    tally = Tally(patience=0.05)
    await tally.count("questions", asyncio.sleep(3600, True))
    assert tally.wrong == ["questions: lost: no end within its limit"]
    assert [patience(seconds) for seconds in (20, 60, 120, 600)] == [60, 60, 120, 300]


async def test_a_busy_machine_is_given_more_time():
    assert slowness((10.0, 1.0), (14.0, 9.0)) == 1.0  # two processors at once
    assert slowness((10.0, 1.0), (40.0, 11.0)) == 3.0


async def test_clock_jumps_change_no_answer():
    tally = Tally()
    await jump_clock(tally, 1.5, random.Random(3))
    assert tally.injected["clock jumps"] > 3 and tally.fired["clock jumps"]


async def _lines(*lines: str):
    for line in lines:
        yield line


async def test_a_stream_is_read_like_a_whole_answer():
    chunks = (
        '{"choices":[{"index":1,"text":"a","token_ids":[5]}]}',
        '{"choices":[{"index":1,"finish_reason":"stop"}]}',
    )
    found = await streamed(_lines(*(f"data: {chunk}" for chunk in chunks), "", "data: [DONE]"))
    assert found == {1: Choice("a", [5], {}, "stop")}


async def test_a_cut_stream_is_no_answer():
    with pytest.raises(AssertionError, match="end mark"):
        await streamed(_lines('data: {"choices":[]}'))
    with pytest.raises(ErrorEvent, match="deadline"):
        await streamed(_lines('data: {"error":{"code":"deadline_exceeded"}}'))


async def test_a_check_that_raises_counts_as_wrong():
    async def lost() -> bool:
        raise AssertionError("another answer")

    tally = Tally()
    await tally.count("questions", lost())
    assert tally.injected["questions"] == 1 and not tally.survived["questions"]
    assert tally.wrong == ["questions: AssertionError: another answer"]


async def test_an_injected_fault_without_effect_is_reported():
    async def nothing() -> bool:
        return False

    tally = Tally()
    tally.fired.update(dict.fromkeys(HARMS, 1))
    tally.fired.update({KILL: 1, JUMPS: 1})
    tally.seen.update(dict.fromkeys(EVENTS, 1))
    assert idle(tally) == []
    del tally.fired["disk full"]
    await tally.count("disk full", nothing())
    assert tally.survived["disk full"] == 1 and idle(tally) == ["no effect of: disk full"]


def test_one_descriptor_too_many_is_a_leak():
    base = Facts(fds=20, threads=("log", "python"), bytes=100 << 20, children=2)
    assert base.excess(base) == []
    assert Facts(21, ("log", "python"), 100 << 20, 2).excess(base) == ["fds: 21, at most 20"]
    assert Facts(19, ("log", "python"), 100 << 20, 2).excess(base) == []
    assert Facts(20, ("log", "log"), 400 << 20, 4).excess(base) == [
        "children: 4, not 2",
        "thread 'log': 2, not 1",
        "thread 'python': 0, not 1",
        f"bytes: {400 << 20}, at most {196 << 20}",
    ]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the names of threads are read from /proc")
def test_threads_of_a_pool_count_as_a_leak_if_it_exists_twice():
    script = (
        "import threading; from concurrent.futures import ThreadPoolExecutor\n"
        "event, pools = threading.Event(), [ThreadPoolExecutor(2, 'some-long-name-of-a-pool') for _ in range(3)]\n"
        "for pool in pools[:{pools}]: pool.submit(event.wait)\n"
        "threading.Thread(target=event.wait, name='alone').start()\n"
        "threading.Timer(60, print).start()\n"
        "import os, time; time.sleep(0.2); print(flush=True); input(); os._exit(0)"  # a thread is named after its start
    )
    for pools, more in ((0, ()), (1, ()), (3, ("ame-of-a-pool_",) * 2)):
        command = [sys.executable, "-S", "-c", NAMES + script.format(pools=pools)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout
            process.stdout.readline()
            found = [name for name in named_threads(process.pid) if not name.startswith("python")]
            process.communicate(b"\n")
        assert found == sorted((TIMER, "alone", *more))


def test_a_death_is_counted_once(tmp_path):
    """Also the death of an engine during startup, whose reason is logged again before the next attempt."""
    server = Server("", None, tmp_path / "log", None)  # type: ignore[arg-type]
    died = "the engine process exited with status -9"
    (tmp_path / "log").write_text(
        f"{died}; restarting it\n"
        f"attempt 1 to restart the engine failed: {died} during start-up\n"
        f"{died} during start-up; next attempt in 1 seconds\n"
    )
    server.kills = 2
    assert server.complaints() == []
    server.kills = 1
    assert server.complaints() == ["2 deaths of the engine, 1 by the soak"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_wall_clock_of_a_process_can_be_set(tmp_path):
    wall = WallClock(tmp_path)
    assert wall.jump(random.Random(0)) == wall.shift != 0
    script = "import time; print(time.time(), time.monotonic())"
    run = subprocess.run(
        [sys.executable, "-S", "-c", script],
        env=wall.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    reported, monotonic = map(float, run.stdout.split())
    assert abs(reported - time.time() - wall.shift) < 600 and abs(monotonic - time.monotonic()) < 600
