"""Ranks as processes: their answers are those of one rank, they end together, and streams survive the loss of one."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from kvasir.config import EngineOptions, check
from kvasir.engine import ranks
from kvasir.engine.core import EngineCore
from kvasir.engine.subprocess import ProcessEngine
from kvasir.errors import ConfigError, DeviceFault, KvasirError
from kvasir.memory import Footprint
from kvasir.ops import native
from kvasir.types import Request, SamplingParams
from tests.engine.cores import CLASSIFIERS, core_of, random_model
from tests.engine.test_pooled_tasks import requests_for
from tests.oracle import mixed_requests, plain, same, together

pytestmark = pytest.mark.skipif(not native.available(), reason=native.reason())

FAST: list[Any] = [("mini", 2, {"dtype": "bfloat16"})]
SLOW: list[Any] = [
    ("mini", 8, {"dtype": "bfloat16", "kv_dtype": "int8"}),
    ("mini", 4, {"quantize": "q4"}),
    ("llama", 4, {"dtype": "float32"}),
    ("mixtral", 2, {"dtype": "bfloat16", "overlap": True}),
    ("qwen3-moe", 4, {"dtype": "bfloat16", "expert_parallel": True}),
    ("qwen3-next", 2, {"dtype": "float32"}),
    ("gpt2", 2, {"quantize": "q8"}),
    ("deepseek-v2", 2, {"dtype": "bfloat16"}),
]
CASES = [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


def ranked_core(folder: str, size: int, **options: Any) -> EngineCore:
    return core_of(folder, executor="program", threads=size, tensor_parallel=size, **options)


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "kvasir.engine.rank" in _command(child)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.ZombieProcess:  # that another test has killed
        return ""


def open_files() -> list[str]:
    links = (os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _exists(fd))
    return [link for link in links if "kvasir-" in link]


def _exists(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


@pytest.mark.parametrize(("kind", "size", "options"), CASES)
def test_answers_of_processes_equal_those_of_one_rank(tmp_path, kind, size, options):
    folder = "kvasir-mini" if kind == "mini" else random_model(kind, tmp_path)
    alone = {name: value for name, value in options.items() if name != "expert_parallel"}
    core = core_of(folder, executor="program", threads=1, max_num_seqs=1, num_blocks=40, **alone)
    requests = mixed_requests(core.info.vocab_size, 256, longest=100)
    expected = plain(core, requests)
    parameters = core.info.num_parameters
    core.close()
    gc.collect()  # what tests before have left
    before = open_files()
    core = ranked_core(folder, size, block_size=16, num_blocks=60, max_chunk=29, max_num_batched_tokens=61, **options)
    assert len(children()) == size - 1 and core.info.num_parameters == parameters and core.info.grade == "exact"
    assert f"{size} ranks of 1 threads" in core.summary[1]
    core.runner.cache.fill_(np.nan)  # type: ignore[attr-defined]
    same(expected, together(core, requests, seed=size, preempt=0.2, cancel=("r2",)), leave_out=("r2",))
    assert core.stats().preemptions > 0
    core.close()
    assert not children()
    del core
    gc.collect()
    assert open_files() == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*CLASSIFIERS])
def test_classifiers_and_pairs(tmp_path, kind):
    """Rank 0 pools and classifies; the types of a pair's tokens go to all ranks."""
    folder = random_model(kind, tmp_path)
    core = core_of(folder, dtype="float32", executor="program", threads=1, max_num_seqs=1)
    requests = requests_for(core.info.tasks[0], "pairs" in kind)
    expected = plain(core, requests)
    core.close()
    core = ranked_core(folder, 2, dtype="float32", block_size=16)
    same(expected, together(core, requests))
    core.close()


# -- losses --------------------------------------------------------------------------------------------


def asked(count: int) -> list[Request]:
    return [
        Request(
            f"r{i}",
            tuple(range(5 + i, 25 + i)),
            params=SamplingParams(max_tokens=120, temperature=0.8, seed=i, ignore_eos=True),
        )
        for i in range(count)
    ]


async def answer(engine: ProcessEngine, request: Request, got: list[int]) -> list[int]:
    async for delta in engine.submit(request):
        assert delta.error is None, delta.error
        got += delta.token_ids
    return got


async def gone(processes: list[psutil.Process]) -> None:
    async with asyncio.timeout(60):
        while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes):
            await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
async def test_streams_survive_the_loss_of_a_rank_at_any_point(size):
    rng = random.Random(size)
    engine = ProcessEngine(
        EngineOptions("kvasir-mini", dtype="bfloat16", threads=size, tensor_parallel=size, max_model_len=512)
    )
    await engine.start()
    expected = await asyncio.gather(*(answer(engine, request, []) for request in asked(4)))
    for what in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL, signal.SIGKILL):
        assert engine.pid
        ranks, restarts = psutil.Process(engine.pid).children(), engine.restarts
        assert len(ranks) == size - 1
        got: list[list[int]] = [[] for _ in range(4)]
        tasks = [asyncio.create_task(answer(engine, *pair)) for pair in zip(asked(4), got, strict=True)]
        while sum(map(len, got)) < rng.randrange(200):
            await asyncio.sleep(0.001)
        os.kill(rng.choice(ranks).pid, what)
        assert await asyncio.wait_for(asyncio.gather(*tasks), 120) == expected
        async with asyncio.timeout(60):
            while engine.restarts == restarts:
                await asyncio.sleep(0.02)
        await gone(ranks)
    last = psutil.Process(engine.pid).children()
    await engine.stop()
    await gone(last)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [False, True])
async def test_ranks_end_with_their_engine_even_if_they_are_stopped(stopped):
    engine = ProcessEngine(
        EngineOptions("kvasir-mini", dtype="bfloat16", threads=2, tensor_parallel=2, max_model_len=512)
    )
    await engine.start()
    assert engine.pid
    ranks = psutil.Process(engine.pid).children()
    for one in ranks if stopped else ():
        one.suspend()
    os.kill(engine.pid, signal.SIGKILL)
    await gone(ranks)
    assert await answer(engine, asked(1)[0], [])
    await engine.stop()


@pytest.mark.slow
def test_an_engine_in_this_process_dies_with_a_rank_and_leaves_no_process():
    core = ranked_core("kvasir-mini", 2, max_model_len=512)
    for request in asked(2):
        core.add(request)
    core.step()
    [rank] = children()
    rank.kill()
    with pytest.raises(DeviceFault, match="rank 1 exited with status -9"):
        while core.has_work():
            core.step()
    begun = time.monotonic()
    core.close()
    assert time.monotonic() - begun < 30 and not children()


# -- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tensor_parallel": 3}, "expected 1, 2, 4 or 8"),
        ({"tensor_parallel": 0}, "expected 1, 2, 4 or 8"),
        ({"tensor_parallel": 2, "executor": "eager"}, "the eager executor has no ranks"),
        ({"pipeline_parallel": 2, "executor": "graph"}, "stages are for the program executor"),
        ({"pipeline_parallel": 2, "device": "cuda"}, "stages are for the program executor"),
        ({"expert_parallel": True}, "without ranks"),
    ],
)
def test_what_ranks_cannot_do_is_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        check(EngineOptions("kvasir-mini", **options))
    check(EngineOptions("kvasir-mini", tensor_parallel=2, speculate="ngram,draft=kvasir-mini"))
    check(EngineOptions("kvasir-mini", tensor_parallel=2, pipeline_parallel=2, speculate="mtp"))


@pytest.mark.parametrize(("size", "communicators"), [(1, 0), (2, 1), (8, 3)])
def test_ranks_on_gpus_leave_memory_for_their_library(size, communicators):
    one = Footprint(buffers=10, samplers=3)
    assert ranks.of_ranks(size, 1, one, "cuda") == replace(one, buffers=10 + communicators * ranks.NCCL_BYTES)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size", "reason"), [("llama", 2, "no mixture"), ("mixtral", 8, "fewer experts")])
def test_experts_that_cannot_be_shared_by_id_are_refused(tmp_path, kind, size, reason):
    with pytest.raises(ConfigError, match=reason):
        ranked_core(random_model(kind, tmp_path), size, expert_parallel=True)
    assert not children()


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_or_shared_ends_all_ranks(tmp_path: Path):
    folder = Path(random_model("llama", tmp_path))
    weights = next(folder.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(KvasirError):
        ranked_core(str(folder), 2)
    assert not children()
