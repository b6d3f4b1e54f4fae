"""Ranks and stages that stream their parts of the weights: the same answers, each from a file of its own, and streams
that survive the loss of one."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import psutil
import pytest

from kvasir.config import EngineOptions
from kvasir.engine.core import EngineCore
from kvasir.engine.subprocess import ProcessEngine
from kvasir.errors import ConfigError, DeviceFault
from kvasir.inputs import Adapter
from kvasir.ops import native
from kvasir.runner.streaming import held_folder
from tests.engine.cores import core_of, random_model
from tests.engine.test_rank_processes import answer, asked, children, gone
from tests.lora.kinds import everything
from tests.lora.served import adapted_core, log_probabilities
from tests.oracle import mixed_requests, plain, same, together

pytestmark = pytest.mark.skipif(not native.available(), reason=native.reason())

MINI = 4_500_000  # bytes, of the 5.4 million of two ranks of the bundled model
FAST: list[Any] = [("mini", 2, 1, {"dtype": "bfloat16"})]
SLOW: list[Any] = [
    ("mini", 4, 1, {"dtype": "float32"}),
    ("mini", 2, 1, {"quantize": "q8"}),
    ("mini", 4, 1, {"quantize": "q4", "overlap": True}),
    ("mini", 1, 2, {"dtype": "bfloat16"}),
    ("mini", 2, 2, {"quantize": "q8"}),
    ("mixtral", 2, 1, {"dtype": "bfloat16"}),
    ("qwen3-moe", 4, 1, {"dtype": "float32", "expert_parallel": True}),
    ("qwen3-next", 2, 1, {"dtype": "float32"}),
    ("gemma4", 1, 2, {"dtype": "float32"}),
]
CASES = [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.fixture(autouse=True)
def packed(tmp_path, monkeypatch):
    monkeypatch.setenv("KVASIR_PACKED", str(tmp_path / "packed"))
    return tmp_path / "packed"


def core_with(folder: str, size: int, stages: int, **options: Any) -> EngineCore:
    count = size * stages
    return core_of(
        folder, executor="program", threads=count, tensor_parallel=size, pipeline_parallel=stages, **options
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "size", "stages", "options"), CASES)
def test_answers_equal_those_of_one_process_that_streams_nothing(
    tmp_path, packed, monkeypatch, kind, size, stages, options
):
    folder = "kvasir-mini" if kind == "mini" else random_model(kind, tmp_path)
    alone = {name: value for name, value in options.items() if name not in ("expert_parallel", "overlap")}
    core = core_of(folder, executor="program", threads=1, max_num_seqs=1, num_blocks=40, **alone)
    requests = mixed_requests(core.info.vocab_size, 256, longest=100)
    expected = plain(core, requests)
    core.close()
    some = lambda needs, free, wish: [(one.least + one.all) // 2 for one in needs]  # noqa: E731
    monkeypatch.setattr("kvasir.engine.ranks.allot", some)
    limits = {"block_size": 16, "num_blocks": 60, "max_chunk": 29, "max_num_batched_tokens": 61}
    for _ in range(2):  # the files are written once, and read by the next start
        core = core_with(folder, size, stages, **limits, **options)
        assert any("the weights are streamed: " in line for line in core.summary)
        core.runner.cache.fill_(np.nan)  # type: ignore[attr-defined]
        same(expected, together(core, requests, seed=size, preempt=0.2, cancel=("r2",)), leave_out=("r2",))
        assert core.stats().weights_read_bytes > 0
        core.close()
    assert {path.stem.rpartition("-")[2] for path in packed.glob("*.weights")} == {
        f"{number}of{size * stages}" for number in range(size * stages)
    }


@pytest.mark.slow
def test_all_ranks_together_take_what_the_user_gave(packed):
    core = core_with("kvasir-mini", 2, 1, dtype="bfloat16", weights_memory=MINI)
    held = core.runner.executor.stream  # type: ignore[attr-defined]
    assert 0 < held.held <= MINI // 2
    core.close()
    sizes = sorted(path.stat().st_size for path in packed.glob("*.weights"))
    assert len(sizes) == 2 and sizes[0] == sizes[1]  # each has its own half
    core = core_with("kvasir-mini", 1, 1, dtype="bfloat16", weights_memory=MINI)
    core.close()
    assert sum(sizes) <= max(path.stat().st_size for path in packed.glob("*.weights")) + 64 * 4096


def test_too_little_memory_for_all_ranks_is_refused_and_ends_them():
    with pytest.raises(ConfigError, match="too few: this model needs"):
        core_with("kvasir-mini", 2, 1, weights_memory=1 << 20)
    assert not children()


@pytest.mark.slow
def test_an_engine_that_packs_waits_for_another(monkeypatch):
    """No rank writes while another engine has the folder, and no rank is taken for dead meanwhile."""
    monkeypatch.setattr("kvasir.engine.ranks.LOAD_SECONDS", 0.5)
    cores: list[EngineCore] = []
    start = Thread(target=lambda: cores.append(core_with("kvasir-mini", 2, 1, dtype="bfloat16", weights_memory=MINI)))
    with held_folder() as folder:
        start.start()
        start.join(3)
        assert start.is_alive() and not [*folder.glob("*.part"), *folder.glob("*.weights")]
    start.join(60)
    assert cores
    cores[0].close()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size", "stages"), [("llama", 2, 1), ("mixtral", 8, 1), ("qwen3-moe", 2, 2)])
@pytest.mark.parametrize("streams", [False, True])
def test_adapters_of_every_kind_change_nothing(tmp_path, monkeypatch, kind, size, stages, streams):
    """With magnitudes of the table, whose rows ranks share, and on experts of which each of 8 ranks has parts."""
    folder, found = random_model(kind, tmp_path), []
    whole = core_of(folder, executor="program", threads=1, dtype="float32").runner.executor.model  # type: ignore[attr-defined]
    adapters = {name: everything(whole, seed) for seed, name in enumerate("xy")}
    for adapter in adapters.values():
        width = np.linspace(0.5, 2, len(adapter.tables["embed"].b), dtype=np.float32)
        adapter.tables["embed"] = replace(adapter.tables["embed"], magnitude=width)  # type: ignore[index]
    if streams:
        some = lambda needs, free, wish: [one.least + 8 * 4096 for one in needs]  # noqa: E731
        monkeypatch.setattr("kvasir.engine.ranks.allot", some)
    for shape in ({}, {"threads": size * stages, "tensor_parallel": size, "pipeline_parallel": stages}):
        core = adapted_core(folder, "program", adapters, **shape)
        assert any("weights are streamed" in line for line in core.summary) == bool(streams and shape)
        ids = [5, 9, 200, 31, 7, 7]
        found.append([log_probabilities(core, ids, *(Adapter(name) for name in names)) for names in ("", "x", "yx")])
        core.close()
    for before, after in zip(*found, strict=True):
        assert np.array_equal(before.view(np.uint32), after.view(np.uint32))


# -- losses --------------------------------------------------------------------------------------------


async def streams(engine: ProcessEngine, got: list[list[int]]) -> list[list[int]]:
    return await asyncio.gather(*(answer(engine, *pair) for pair in zip(asked(len(got)), got, strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["kill", "stop", "change", "cut"])
async def test_streams_survive_the_loss_of_a_rank_and_of_its_file(packed, harm):
    engine = ProcessEngine(
        EngineOptions(
            "kvasir-mini", dtype="bfloat16", threads=2, tensor_parallel=2, max_model_len=512, weights_memory=MINI,
            speculate="off",
        )
    )  # fmt: skip
    await engine.start()
    expected = await streams(engine, [[] for _ in range(3)])
    got: list[list[int]] = [[] for _ in range(3)]
    assert engine.pid
    ranks, running = psutil.Process(engine.pid).children(), asyncio.create_task(streams(engine, got))
    while sum(map(len, got)) < 30:
        await asyncio.sleep(0.001)
    [path] = packed.glob("*-1of2.weights")
    if harm in ("kill", "stop"):
        os.kill(ranks[0].pid, signal.SIGKILL if harm == "kill" else signal.SIGSTOP)
    elif harm == "cut":
        os.truncate(path, 0)
    else:
        with Path(path).open("r+b") as file:
            file.write(os.urandom(path.stat().st_size))
    assert await asyncio.wait_for(running, 120) == expected
    await gone(ranks)
    assert engine.restarts == 1
    await engine.stop()


@pytest.mark.slow
def test_a_rank_that_dies_during_a_pass_ends_the_engine_and_all_processes():
    core = core_with("kvasir-mini", 4, 1, max_model_len=512, dtype="bfloat16", weights_memory=MINI)
    for request in asked(2):
        core.add(request)
    core.step()
    children()[1].kill()
    with pytest.raises(DeviceFault, match="exited with status -9"):
        while core.has_work():
            core.step()
    core.close()
    assert not children()
