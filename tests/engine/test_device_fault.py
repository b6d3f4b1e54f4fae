"""A device that fails: unlike any other error of a step, it ends the engine, because nothing after it can be trusted.
The engine in a process of its own is in test_process.py."""

from __future__ import annotations

import asyncio

import pytest

from kvasir.device import raise_fault
from kvasir.engine.core import EngineCore
from kvasir.engine.inproc import InProcessEngine
from kvasir.errors import DeviceFault, EngineDead
from kvasir.runner.fake import FakeRunner
from kvasir.sched.scheduler import Scheduler
from kvasir.types import Request, SamplingParams

FATAL = 255


def core_of() -> EngineCore:
    runner = FakeRunner(device_fault_token=FATAL)
    return EngineCore(runner, Scheduler(runner.capacity))


def request(id: str, *ids: int) -> Request:
    return Request(id, ids, SamplingParams(max_tokens=3, seed=0, ignore_eos=True))


def test_the_core_raises_it():
    core = core_of()
    core.add(request("r", 1, FATAL))
    with pytest.raises(DeviceFault, match="illegal memory access"):
        while core.has_work():
            core.step()


async def test_an_engine_in_this_process_dies_for_all_its_requests():
    engine = InProcessEngine(core_of)
    await engine.start()

    async def answer(asked: Request) -> None:
        async for _ in engine.submit(asked):
            pass

    waiting = [asyncio.create_task(answer(request(f"r{i}", 1, *([FATAL] * i)))) for i in range(2)]
    found = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)
    assert isinstance(found[1], EngineDead) and "DeviceFault" in str(found[1])
    with pytest.raises(EngineDead):
        await answer(request("later", 1))
    await engine.stop()


def test_an_error_of_the_gpu_is_one_and_running_out_of_memory_is_not():
    torch = pytest.importorskip("torch")
    with pytest.raises(DeviceFault, match="CUDA error: an illegal memory access"):
        raise_fault(torch.AcceleratorError("CUDA error: an illegal memory access\nCompile with ..."))
    raise_fault(torch.OutOfMemoryError("CUDA out of memory"))
    raise_fault(ValueError("something else"))
