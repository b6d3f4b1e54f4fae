"""The progress of prompts in deltas: over processes, hosts and fleets, and nothing left of requests that end early."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvasir.engine.core import EngineCore
from kvasir.runner.fake import FakeRunner
from kvasir.sched.scheduler import Scheduler
from tests.engine.test_process import expected, until
from tests.engine.test_reset import MAKES
from tests.fleet.fleets import fleet
from tests.sched.drive import request

LONG = list(range(200))


async def followed(engine, asked) -> tuple[list[int], dict[int, list[int]]]:
    """The progress of a request, and its tokens."""
    steps: list[int] = []
    tokens: dict[int, list[int]] = {}
    async for delta in engine.submit(replace(asked, progress=True)):
        if delta.progress is not None:
            assert not delta.token_ids and not delta.finish_reason and delta.progress.seconds >= 0
            steps.append(delta.progress.tokens)
        tokens.setdefault(delta.index, []).extend(delta.token_ids)
    return steps, tokens


@pytest.fixture(params=MAKES)
async def engine(request):
    engine = MAKES[request.param]()
    await engine.start()
    yield engine
    await engine.stop()


async def test_it_grows_to_the_whole_prompt_and_changes_no_token(engine):
    asked = [request(f"r{i}", LONG[i:], max_tokens=10, n=1 + i % 2, seed=i, temperature=1.0) for i in range(4)]
    for one, (steps, tokens) in zip(asked, await asyncio.gather(*(followed(engine, a) for a in asked)), strict=True):
        assert steps == sorted(steps) and steps[-1] == len(one.prompt_ids) and len(steps) >= 2
        assert tokens == expected(one)
    await engine.check()


async def test_a_fleets_first_token_is_no_progress():
    engine = fleet(1)
    await engine.start()
    try:
        stream = engine.submit(replace(request("r", LONG, max_tokens=5), progress=True))
        first = await anext(stream)
        assert first.progress is not None and not engine._open["r"].answered
        assert [delta async for delta in stream][-1].finish_reason
        await until(lambda: not engine._open)
    finally:
        await engine.stop()


def core() -> EngineCore:
    runner = FakeRunner(vocab_size=256, num_blocks=200, max_rows=4, max_model_len=512, max_tokens_per_step=32)
    return EngineCore(runner, Scheduler(runner.capacity))


@pytest.mark.parametrize("end", ["abort", "deadline", "failure", "finish"])
def test_nothing_is_left_of_a_request(end):
    engine = core()
    asked = replace(request("r", LONG, max_tokens=3), progress=True)
    if end == "deadline":
        asked = replace(asked, deadline=1e-9)
    engine.add(asked)
    if end == "failure":
        engine.runner.execute = lambda plan: 1 / 0  # type: ignore[method-assign]
    engine.step()
    if end == "abort":
        engine.abort("r")
    for _ in range(50):
        engine.step()
    assert engine._progress is not None and not engine._progress
    assert not engine._progress._deltas and not engine._progress._index
