"""The end of an engine: it waits for the step in progress, frees nothing that threads still use, and happens once."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading

import pytest

from kvasir import LLM
from kvasir.config import EngineOptions
from kvasir.engine.build import build_core
from kvasir.engine.core import EngineCore
from kvasir.engine.fake import FakeEngine
from kvasir.engine.inproc import InProcessEngine
from kvasir.errors import ConfigError, EngineDead
from kvasir.ops import native
from kvasir.runner.fake import FakeRunner
from kvasir.sched.scheduler import Scheduler
from tests.sched.drive import request

needs_kernels = pytest.mark.skipif(not native.available(), reason=f"native kernels: {native.reason()}")


class Recorder(FakeRunner):
    """Notes the order of calls."""

    def __init__(self, **options):
        super().__init__(overlaps=True, **options)
        self.calls: list[str] = []

    def execute(self, plan):
        self.calls.append("execute")
        return super().execute(plan)

    def sample(self, pending, masks={}, ahead=None):  # noqa: B006
        self.calls.append("sample")
        return super().sample(pending, masks, ahead)

    def close(self):
        self.calls.append("close")
        super().close()


def join_engines() -> None:
    for thread in threading.enumerate():
        if thread.name == "kvasir-engine":
            thread.join()


def recorded(**options) -> tuple[EngineCore, list[str]]:
    runner = Recorder(**options)
    return EngineCore(runner, Scheduler(runner.capacity)), runner.calls


def test_a_core_takes_the_result_of_its_step_before_its_runner_closes():
    core, calls = recorded()
    core.add(request("a", [1, 2, 3], max_tokens=9))
    core.step()
    assert calls == ["execute"]
    core.close()
    core.close()
    assert calls == ["execute", "sample", "close"]


def test_a_runner_closes_though_the_last_step_and_the_tier_fail():
    core, calls = recorded(fault=None)
    core.add(request("a", [1], max_tokens=9))
    core.step()

    def broken(*args):
        raise AssertionError("the books do not balance")

    core.scheduler.commit = broken
    with pytest.raises(AssertionError, match="balance"):
        core.close()
    assert calls[-1] == "close"


@pytest.mark.parametrize("fault", [None, "step"])
async def test_an_engine_closes_its_runner_also_when_it_dies(fault):
    core, calls = recorded(step_seconds=0.002)
    engine = InProcessEngine(lambda: core)
    await engine.start()
    stream = engine.submit(request("a", [1], max_tokens=400))
    await anext(stream)
    if fault:
        core.scheduler.plan = None  # type: ignore[assignment]
        with pytest.raises(EngineDead):
            async for _ in stream:
                pass
    await stream.aclose()
    await asyncio.gather(engine.stop(), engine.stop())
    await engine.stop()
    assert calls.count("close") == 1 and calls.count("execute") == calls.count("sample")


async def test_a_step_that_does_not_end_keeps_its_memory_and_is_logged(monkeypatch, caplog):
    monkeypatch.setattr("kvasir.engine.inproc.LAST_STEP", 0.05)
    go_on, begun = threading.Event(), threading.Event()

    def stuck(plan):
        begun.set()
        go_on.wait()

    core, calls = recorded(fault=stuck)
    engine = InProcessEngine(lambda: core)
    await engine.start()
    stream = asyncio.ensure_future(anext(engine.submit(request("a", [1]))))
    await asyncio.to_thread(begun.wait)
    with caplog.at_level(logging.WARNING):
        await engine.stop()
    assert "0.05 seconds" in caplog.text and "close" not in calls
    go_on.set()
    await engine.stop()
    await asyncio.to_thread(join_engines)
    assert calls[-1] == "close"
    with pytest.raises(EngineDead):
        await stream


async def test_a_start_that_is_cancelled_leaves_no_engine():
    go_on = threading.Event()
    core, calls = recorded()

    def build() -> EngineCore:
        go_on.wait()
        return core

    engine = InProcessEngine(build)
    start = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    go_on.set()
    await asyncio.to_thread(join_engines)
    assert calls == ["close"]


async def test_a_launched_engine_builds_before_its_start_and_builds_once():
    built, (core, calls) = threading.Event(), recorded()

    def build() -> EngineCore:
        assert not built.is_set()
        built.set()
        return core

    engine = InProcessEngine(build)
    engine.launch()
    assert await asyncio.to_thread(built.wait, 30)
    await engine.start()
    engine.abandon()  # has no effect on a started engine
    assert [d async for d in engine.submit(request("a", [1], max_tokens=2))][-1].finish_reason
    await engine.stop()
    assert calls[-1] == "close"


def test_an_abandoned_engine_closes_its_core():
    core, calls = recorded()
    engine = InProcessEngine(lambda: core)
    engine.launch()
    engine.abandon()
    join_engines()
    assert calls == ["close"]


async def test_a_launched_engine_that_cannot_be_built_raises_at_its_start():
    def build() -> EngineCore:
        raise ConfigError("no such thing")

    engine = InProcessEngine(build)
    engine.launch()
    await asyncio.to_thread(join_engines)
    with pytest.raises(ConfigError, match="no such thing"):
        await engine.start()


async def test_an_engine_starts_again_after_its_end():
    engine = FakeEngine()
    for _ in range(2):
        await engine.start()
        assert [d.finish_reason async for d in engine.submit(request("a", [1], max_tokens=1))][-1]
        await engine.stop()
        await engine.stop()


def test_a_core_whose_tier_cannot_be_made_leaves_no_threads(monkeypatch):
    made = []

    def fails(options, config, info, cache, weights):
        made.append(threading.active_count())
        raise ConfigError("no tier")

    monkeypatch.setattr("kvasir.engine.tier.make_tier", fails)
    before = threading.active_count()
    with pytest.raises(ConfigError, match="no tier"):
        build_core(EngineOptions("kvasir-mini", executor="eager", num_blocks=40))
    assert made and threading.active_count() == before


@needs_kernels
@pytest.mark.parametrize("forgotten", [False, True])
def test_kernel_threads_end_their_step_before_its_memory_goes(forgotten):
    core = build_core(EngineOptions("kvasir-mini", threads=1, overlap=True, max_num_batched_tokens=1024))
    program = core.runner.executor.program  # type: ignore[attr-defined]
    core.add(request("a", [i % 300 for i in range(1000)], max_tokens=9))
    program.struct.kernel_nanoseconds = 0
    core.step()
    assert program.seconds == 0, "the step is in progress"
    if forgotten:
        struct = program.struct
        del core, program
        gc.collect()
        assert struct.kernel_nanoseconds
    else:
        core.close()
        assert program.seconds > 0
        with pytest.raises(AssertionError, match="closed"):
            program.start(1, 1)


# -- whole processes ---------------------------------------------------------------------------------------------------

BEGIN = """
import asyncio, sys, threading, time
from kvasir import LLM, AsyncLLM, SamplingParams
from kvasir.engine.fake import FakeEngine
OPTIONS = dict(threads=1, overlap=True, max_num_batched_tokens=8192)
PARAMS = SamplingParams(temperature=0, max_tokens=20)
def prompts(length):
    return [{"prompt_token_ids": [5 + (7 * i + j) % 300 for j in range(length)]} for i in range(24)]
"""

CANCELLED = """
async def main():
    async with AsyncLLM("kvasir-mini", **OPTIONS) as llm:
        asks = [asyncio.ensure_future(llm.complete(p, PARAMS)) for p in prompts(llm.info.max_model_len - 40)]
        await asyncio.sleep(0.3)
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)
asyncio.run(main())
"""

NEVER_CLOSED = """
llm = LLM("kvasir-mini", progress=False, **OPTIONS)
work = prompts(llm.info.max_model_len - 40)
threading.Thread(target=lambda: llm.generate(work, PARAMS), daemon=True).start()
time.sleep(0.3)
"""

NEVER_STOPPED = """
async def main():
    llm = await AsyncLLM("kvasir-mini", **OPTIONS).start()
    asks = [asyncio.ensure_future(llm.complete(p, PARAMS)) for p in prompts(llm.info.max_model_len - 40)]
    await asyncio.sleep(0.3)
asyncio.run(main())
"""

FAKE_NEVER_STOPPED = """
from tests.sched.drive import request
async def main():
    engine = FakeEngine(step_seconds=0.01)
    await engine.start()
    await anext(engine.submit(request("a", [1], max_tokens=400)))
asyncio.run(main())
"""


def status_of(script: str, **replaced: str) -> tuple[int, str]:
    for old, new in replaced.items():
        script = script.replace(old, new)
    done = subprocess.run([sys.executable, "-c", BEGIN + script], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr


def test_an_interpreter_that_ends_with_an_engine_in_a_step_ends_well():
    assert status_of(FAKE_NEVER_STOPPED) == (0, "")


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("script", [CANCELLED, NEVER_CLOSED, NEVER_STOPPED])
@pytest.mark.parametrize("executor", ["program", "eager"])
def test_a_process_that_exits_during_a_step_does_not_crash(script, executor):
    for _ in range(3):
        status, reply = status_of(script, **{"threads=1": f"threads=1, executor='{executor}'"})
        assert status == 0, reply


def test_llm_closes_once_from_whatever_thread():
    llm = LLM("kvasir-mini", progress=False, threads=1, num_blocks=40)
    threads = [threading.Thread(target=llm.close) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    llm.close()
    assert not any(thread.name == "kvasir-llm" for thread in threading.enumerate())
