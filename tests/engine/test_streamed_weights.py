"""Engines whose weights are streamed: adapters, drafts and stored prefixes change nothing, memory stays bounded, and
streams survive a file that is damaged while they run."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvasir.config import EngineOptions, check
from kvasir.engine.subprocess import ProcessEngine
from kvasir.environment import engine_environment
from kvasir.errors import ConfigError
from kvasir.inputs import Adapter
from kvasir.ops import native
from kvasir.runner import streaming
from kvasir.types import Request, SamplingParams
from tests.engine.cores import core_of, random_model
from tests.oracle import mixed_requests, plain, same, together

pytestmark = pytest.mark.skipif(not native.available(), reason=native.reason())

MINI = 4_000_000  # bytes, of the 7.3 million of the bundled model's weights: some layers stay
SMALL = {"executor": "program", "threads": 1, "block_size": 16}


@pytest.fixture(autouse=True)
def packed(tmp_path, monkeypatch):
    monkeypatch.setenv("KVASIR_PACKED", str(tmp_path / "packed"))
    return tmp_path / "packed"


@pytest.mark.parametrize("speculate", ["ngram", pytest.param("draft=kvasir-mini", marks=pytest.mark.slow)])
def test_drafts_and_the_prefix_cache_change_nothing(speculate):
    core = core_of("kvasir-mini", **SMALL, max_num_seqs=1, speculate="off", prefix_cache=False, max_model_len=256)
    requests = mixed_requests(core.info.vocab_size, 200, count=4, longest=80)
    expected = plain(core, requests)
    core.close()
    core = core_of("kvasir-mini", **SMALL, weights_memory=MINI, speculate=speculate, max_chunk=48, max_model_len=256)
    assert any("weights are streamed" in line for line in core.summary)
    for seed in range(2):  # the second time prompts are in the cache
        same(expected, together(core, requests, seed=seed, preempt=0.2))
    stats = core.stats()
    assert stats.cached_tokens > 0 and stats.weights_read_bytes > 0 and stats.weights_wait_seconds > 0
    core.close()


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3-moe", marks=pytest.mark.slow)])
def test_adapters_of_every_kind_change_nothing(tmp_path, kind):
    """Those with magnitudes read the weights when they are packed, which no step has in memory then."""
    pytest.importorskip("torch")
    from tests.lora.kinds import everything
    from tests.lora.served import adapted_core, log_probabilities

    folder, found = random_model(kind, tmp_path), []
    whole = core_of(folder, **SMALL, dtype="float32").runner.executor.model  # type: ignore[attr-defined]
    adapters = {name: everything(whole, seed) for seed, name in enumerate("xy")}
    size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    for options in ({}, {"weights_memory": size * 85 // 100}):
        core = adapted_core(folder, "program", adapters, **options)
        assert any("weights are streamed" in line for line in core.summary) == bool(options)
        ids = [5, 9, 200, 31, 7, 7]
        found.append([log_probabilities(core, ids, *(Adapter(name) for name in names)) for names in ("", "x", "yx")])
        core.close()
    for before, after in zip(*found, strict=True):
        assert np.array_equal(before.view(np.uint32), after.view(np.uint32))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["mtp", "eagle3"])
def test_heads_that_draft_change_nothing(tmp_path, monkeypatch, drafter):
    """Their own weights stay in memory, and so do the tables that they share with the model."""
    transformers = pytest.importorskip("transformers")
    if drafter == "mtp":
        from tests.models.mtp_oracle import Oracle

        Oracle.of(transformers, "llama", 2).save(tmp_path)
        folder, speculate = tmp_path, "mtp"
    else:
        from tests.models.eagle3_heads import config_of, settings, tensors_of, write
        from tests.models.test_eagle3 import base_folder, ids_of

        kind = "shared-head"
        folder, found = base_folder(tmp_path), settings(kind)
        speculate = f"eagle3={write(tmp_path / 'head', kind, config_of(kind, found, ids_of(kind)), tensors_of(found))}"
    core = core_of(str(folder), **SMALL, dtype="float32", max_num_seqs=1, speculate="off")
    requests = [
        Request(
            f"r{i}", tuple(range(2 + i, 20 + i)), SamplingParams(max_tokens=30, seed=i, ignore_eos=True, logprobs=1)
        )
        for i in range(3)
    ]
    expected = plain(core, requests)
    core.close()
    every = lambda sizes, room: streaming.Split(tuple(range(len(sizes))), 1, max(sizes))  # noqa: E731
    monkeypatch.setattr(streaming, "split_layers", every)
    monkeypatch.setattr("kvasir.runner.allotment.budget_of", lambda needed, free, wish: needed)
    core = core_of(str(folder), **SMALL, dtype="float32", speculate=speculate)
    assert any("0 of" in line and "are streamed" in line for line in core.summary)
    same(expected, together(core, requests))
    assert core.stats().drafted_tokens > 0
    core.close()


async def answer(engine: ProcessEngine, request: Request, got: list[int]) -> list[int]:
    async for delta in engine.submit(request):
        assert delta.error is None, delta.error
        got += delta.token_ids
    return got


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["change", "cut"])
async def test_streams_survive_a_file_that_is_damaged(packed, harm):
    """The engine ends at once, and the next one packs anew and continues with the same tokens."""
    params = SamplingParams(max_tokens=120, temperature=1.0, seed=3, ignore_eos=True)
    requests = [Request(f"r{i}", tuple(range(5 + i, 40 + i)), params) for i in range(3)]
    options = EngineOptions("kvasir-mini", threads=1, max_model_len=512, weights_memory=MINI, speculate="off")
    engine = ProcessEngine(options)
    await engine.start()
    expected = await asyncio.gather(*(answer(engine, request, []) for request in requests))
    got: list[list[int]] = [[] for _ in requests]
    tasks = [asyncio.create_task(answer(engine, *pair)) for pair in zip(requests, got, strict=True)]
    while sum(map(len, got)) < 30:
        await asyncio.sleep(0.001)
    [path] = packed.glob("*.weights")
    if harm == "cut":
        os.truncate(path, 0)
    else:
        with path.open("r+b") as file:
            file.write(os.urandom(path.stat().st_size))
    assert await asyncio.wait_for(asyncio.gather(*tasks), 120) == expected
    assert engine.restarts == 1
    await engine.stop()


PEAK = """
import json, sys
from pathlib import Path
from kvasir.config import EngineOptions
from kvasir.engine.build import build_core
from kvasir.types import Request, SamplingParams

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))

folder, budget = sys.argv[1], int(sys.argv[2]) or None
options = {"num_blocks": 8, "max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 128, "speculate": "off"}
core, peak = build_core(EngineOptions(folder, threads=1, weights_memory=budget, **options)), 0
core.add(Request("r", tuple(range(50)), SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)))
ids = []
while core.has_work():
    ids += [token for delta in core.step() for token in delta.token_ids]
    peak = max(peak, resident())
core.close()
print(json.dumps([ids, peak]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_takes_no_more_memory_than_it_was_given(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    from benchmarks import shapes

    config = shapes.SHAPES["llama-1b"] | {"num_hidden_layers": 8, "vocab_size": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes.tensor_shapes(config)}
    save_file(weights, tmp_path / "model.safetensors")
    size = sum(weight.nbytes for weight in weights.values())
    found = []
    for budget in (0, size * 2 // 5):
        command = [sys.executable, "-c", PEAK, str(tmp_path), str(budget)]
        done = subprocess.run(command, env=engine_environment(), capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (expected, whole), (ids, streamed) = found
    assert ids == expected
    assert whole - streamed > 0.95 * (size - size * 2 // 5)


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="weights_memory is 0"):
        check(EngineOptions("m", weights_memory=0))
