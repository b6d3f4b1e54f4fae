"""Stages as processes, and stages of ranks: their answers are those of one process, and streams survive the loss of
one."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from kvasir.config import EngineOptions, check
from kvasir.engine.core import EngineCore
from kvasir.engine.subprocess import ProcessEngine
from kvasir.errors import ConfigError
from kvasir.ops import native
from kvasir.program import commands
from tests.engine.cores import core_of, random_model
from tests.engine.test_rank_processes import answer, asked, children, gone, open_files
from tests.oracle import mixed_requests, plain, same, together

pytestmark = pytest.mark.skipif(not native.available(), reason=native.reason())

FAST: list[Any] = [("mini", 1, 2, {"dtype": "bfloat16"})]
SLOW: list[Any] = [
    ("mini", 2, 2, {"dtype": "bfloat16", "kv_dtype": "int8"}),
    ("mini", 1, 4, {"quantize": "q4", "overlap": True}),
    ("qwen3-next", 1, 3, {"dtype": "float32"}),
    ("qwen3-moe", 4, 2, {"dtype": "bfloat16", "expert_parallel": True, "overlap": True}),
    ("deepseek-v2", 2, 3, {"dtype": "bfloat16"}),
    ("gemma4", 1, 2, {"dtype": "float32"}),
    ("gpt2", 1, 2, {"quantize": "q8"}),
]
CASES = [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


def staged_core(folder: str, size: int, stages: int, **options: Any) -> EngineCore:
    return core_of(
        folder, executor="program", threads=size * stages, tensor_parallel=size, pipeline_parallel=stages, **options
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "size", "stages", "options"), CASES)
def test_answers_of_stages_equal_those_of_one_process(tmp_path, monkeypatch, kind, size, stages, options):
    monkeypatch.setattr(commands, "LEAST", 3)  # most steps have several parts
    folder = "kvasir-mini" if kind == "mini" else random_model(kind, tmp_path)
    alone = {name: value for name, value in options.items() if name not in ("expert_parallel", "overlap")}
    core = core_of(folder, executor="program", threads=1, max_num_seqs=1, num_blocks=40, **alone)
    requests = mixed_requests(core.info.vocab_size, 256, longest=100)
    expected = plain(core, requests)
    info = core.info
    core.close()
    gc.collect()  # what tests before have left
    before = open_files()
    limits = {"block_size": 16, "num_blocks": 60, "max_chunk": 29, "max_num_batched_tokens": 61}
    core = staged_core(folder, size, stages, **limits, **options)
    assert len(children()) == size * stages - 1 and core.info.grade == "exact"
    assert core.info.num_parameters == info.num_parameters
    assert f"{stages} stages of " in core.summary[1]
    core.runner.cache.fill_(np.nan)  # type: ignore[attr-defined]
    same(expected, together(core, requests, seed=size, preempt=0.2, cancel=("r2",)), leave_out=("r2",))
    assert core.stats().preemptions > 0
    core.close()
    assert not children()
    del core
    gc.collect()
    assert open_files() == before


def test_a_step_of_one_row_reads_all_weights():
    one = core_of("kvasir-mini", executor="program", threads=1, dtype="bfloat16")
    two = staged_core("kvasir-mini", 1, 2, dtype="bfloat16")
    assert two.info.weight_bytes_read == one.info.weight_bytes_read
    assert two.runner.capacity.groups == one.runner.capacity.groups
    one.close()
    two.close()
    del one, two
    gc.collect()


# -- losses --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("size", "stages"), [(1, 3), (2, 2)])
async def test_streams_survive_the_loss_of_a_stage_at_any_point(size, stages):
    rng, count = random.Random(size), size * stages
    engine = ProcessEngine(
        EngineOptions(
            "kvasir-mini", dtype="bfloat16", threads=count, tensor_parallel=size, pipeline_parallel=stages,
            max_model_len=512,
        )
    )  # fmt: skip
    await engine.start()
    expected = await asyncio.gather(*(answer(engine, request, []) for request in asked(4)))
    for what in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL, signal.SIGSTOP):
        assert engine.pid
        others, restarts = psutil.Process(engine.pid).children(), engine.restarts
        assert len(others) == count - 1
        got: list[list[int]] = [[] for _ in range(4)]
        tasks = [asyncio.create_task(answer(engine, *pair)) for pair in zip(asked(4), got, strict=True)]
        while sum(map(len, got)) < rng.randrange(200):
            await asyncio.sleep(0.001)
        os.kill(rng.choice(others).pid, what)
        assert await asyncio.wait_for(asyncio.gather(*tasks), 180) == expected
        async with asyncio.timeout(60):
            while engine.restarts == restarts:
                await asyncio.sleep(0.02)
        await gone(others)
    last = psutil.Process(engine.pid).children()
    await engine.stop()
    await gone(last)


# -- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pipeline_parallel": 0}, "expected 1 to 16"),
        ({"pipeline_parallel": 17}, "expected 1 to 16"),
        ({"pipeline_parallel": 2, "executor": "eager"}, "the eager executor has no stages"),
        ({"pipeline_parallel": 2, "device": "cuda"}, "program executor"),
        ({"pipeline_parallel": 2, "expert_parallel": True}, "without ranks"),
    ],
)
def test_what_stages_cannot_do_is_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        check(EngineOptions("kvasir-mini", **options))
    check(EngineOptions("kvasir-mini", pipeline_parallel=3, speculate="mtp"))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stages", "reason"), [("llama", 4, "2 layers have 1"), ("gemma3n", 2, "0 places")])
def test_a_model_that_cannot_be_divided_ends_all_processes(tmp_path: Path, kind, stages, reason):
    with pytest.raises(ConfigError, match=reason):
        staged_core(random_model(kind, tmp_path), 1, stages)
    assert not children()


# -- drafts --------------------------------------------------------------------------------------------


def check_drafts(folder: str, stages: int, speculate: str) -> None:
    core = core_of(folder, executor="program", threads=1, dtype="float32")
    expected = plain(core, asked(3))
    core.close()
    core = staged_core(folder, 1, stages, dtype="float32", speculate=speculate)
    same(expected, together(core, asked(3)))
    assert core.stats().drafted_tokens > 0
    core.close()


@pytest.mark.slow
def test_a_head_that_uses_tables_of_the_model_drafts(tmp_path):
    """Its taps are hidden rows of several stages; the last stage has both tables."""
    pytest.importorskip("torch")
    from tests.models.eagle3_heads import config_of, settings, tensors_of, write
    from tests.models.test_eagle3 import base_folder, ids_of

    kind = "shared-head"
    folder, s = base_folder(tmp_path), settings(kind)
    head = write(tmp_path / "head", kind, config_of(kind, s, ids_of(kind)), tensors_of(s))
    check_drafts(str(folder), 3, f"eagle3={head}")


@pytest.mark.slow
def test_the_models_own_layers_draft(tmp_path):
    from tests.models.mtp_oracle import Oracle

    Oracle.of(pytest.importorskip("transformers"), "llama", 2).save(tmp_path)
    check_drafts(str(tmp_path), 2, "mtp")


@pytest.mark.slow
def test_a_smaller_model_drafts(tmp_path):
    check_drafts(random_model("llama", tmp_path), 2, f"draft={tmp_path}")
