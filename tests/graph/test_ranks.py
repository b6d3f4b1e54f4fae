"""Ranks of the graph executor: the bits of one rank, over gloo here and over NCCL on machines with several GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

from kvasir.engine.core import EngineCore
from kvasir.errors import ConfigError, DeviceFault, UnsupportedModel
from kvasir.inputs import Adapter
from kvasir.runner.load import LoadOptions, load_model
from kvasir.types import Request, SamplingParams
from kvasir.weights.find import find_model
from tests._shared import need
from tests.engine.cores import core_of
from tests.graph.models import folder_of, graph_core
from tests.graph.test_adapter_kinds import asking, computed
from tests.lora.kinds import everything
from tests.lora.served import adapted_core
from tests.oracle import plain, same, together

pytestmark = pytest.mark.slow

# Sums of 256 columns have eight segments; heads and experts are enough for eight ranks.
SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
SIZES |= {"head_dim": 16, "num_hidden_layers": 2}
CASES = [
    *(("float32", (2, 8), family) for family in ("llama", "mixtral", "gemma2")),
    *(("float32", (4,), family) for family in ("qwen3-moe", "llama-biased-tied")),
    *(("bfloat16", (2,), family) for family in ("qwen2-windows", "phi3", "cohere2")),
]


def outputs(size: int, backend: str, folder: Path, dtype: str, models: Sequence[str]) -> list[dict[str, np.ndarray]]:
    """What each rank computes for the models, see tests.graph.rank_process."""
    outs = [folder / f"{size}-{rank}.npz" for rank in range(size)]
    command = [sys.executable, "-m", "tests.graph.rank_process"]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(size), backend, str(folder / f"store{size}"), str(out), dtype, *models]
        )
        for rank, out in enumerate(outs)
    ]
    try:
        assert [one.wait(1500) for one in running] == [0] * size
    finally:
        for one in running:
            one.kill()
            one.wait()
    return [dict(np.load(out)) for out in outs]


def assert_same(models: Sequence[str], folder: Path, dtype: str, sizes: Sequence[int], backend: str = "gloo") -> None:
    [expected] = outputs(1, backend, folder, dtype, models)
    for size in sizes:
        for found in outputs(size, backend, folder, dtype, models):
            for name, value in expected.items():
                same_bits = np.array_equal(value.view(np.uint32), found[name].view(np.uint32))
                assert same_bits, f"{models[int(name.split()[0])]} on {size} ranks"


@pytest.mark.parametrize(("dtype", "sizes", "family"), CASES)
def test_every_rank_has_the_bits_of_one_alone(tmp_path, dtype, sizes, family):
    assert_same([folder_of(tmp_path, family, **SIZES)], tmp_path, dtype, sizes)


def test_formats_of_files(tmp_path):
    files = [str(need("models", "gguf", f"TinyStories-656K-{kind}.gguf")) for kind in ("Q8_0", "Q4_0", "BF16")]
    assert_same(files, tmp_path, "bfloat16", (2,))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4, 8])
def test_gpus_have_the_bits_of_one(tmp_path, size):
    import torch

    if (found := torch.cuda.device_count()) < size:
        pytest.skip(f"torch sees {found} GPUs, {size} are needed")
    models = []
    for family in ("llama", "mixtral", "gemma2"):
        (tmp_path / family).mkdir()
        models.append(folder_of(tmp_path / family, family, **SIZES))
    assert_same(models, tmp_path, "bfloat16", (size,), "nccl")


# -- engines -------------------------------------------------------------------------------------------


def ranks_of() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "kvasir.engine.rank" in " ".join(child.cmdline())]


def requests() -> list[Request]:
    """Sampled on the device and on the host, with log-probabilities of the prompt, several choices, and a shared
    prefix that the tier keeps."""
    prefix = tuple(range(3, 43))
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 1},
        {"temperature": 0.9, "n": 2, "logprobs": 0},
        {"temperature": 1.0, "mirostat": 2},
        {"temperature": 0.8, "top_k": 20, "presence_penalty": 0.7},
    ]
    return [
        Request(f"r{i}", (*prefix, 50 + i), SamplingParams(**kind, max_tokens=8, seed=i, ignore_eos=True))
        for i, kind in enumerate(kinds)
    ]


def answers(core: EngineCore, asked: list[Request], **how: Any) -> Any:
    try:
        return together(core, asked, **how)
    finally:
        core.close()


def test_answers_of_ranks_equal_those_of_one(tmp_path):
    folder = folder_of(tmp_path, "llama", **SIZES)
    core = graph_core(folder, max_num_seqs=1)
    expected = plain(core, requests())
    core.close()
    core = graph_core(folder, tensor_parallel=2, overlap=True)
    assert len(ranks_of()) == 1
    same(expected, answers(core, requests(), preempt=0.1))
    assert not ranks_of()


def test_blocks_in_a_folder_have_the_shards_of_all_ranks(tmp_path):
    (tmp_path / "model").mkdir()
    folder, stored = folder_of(tmp_path / "model", "llama", **SIZES), str(tmp_path / "blocks")
    core = graph_core(folder, max_num_seqs=1)
    expected = plain(core, requests()[3:])
    core.close()
    for _ in range(2):  # the second engine finds what the first one stored
        core = graph_core(folder, tensor_parallel=2, cache_dir=stored)
        same(expected, together(core, requests()[3:]))
        core.close(60.0)
    assert core.stats().tier_loaded_tokens > 0


def test_a_draft_model_of_rank_0(tmp_path):
    folder = folder_of(tmp_path, "llama", **SIZES)
    core = graph_core(folder, max_num_seqs=1)
    expected = plain(core, requests()[:2])
    core.close()
    core = graph_core(folder, tensor_parallel=2, speculate=f"draft={folder}")
    found = answers(core, requests()[:2])
    same(expected, found)
    assert core.stats().accepted_tokens > 0


def adapters_of(folder: str) -> dict[str, Any]:
    """Adapters of everything that ranks compute."""
    model = load_model(find_model(folder), device="cpu", options=LoadOptions("eager")).model
    made = {name: computed(everything(model, seed)) for seed, name in enumerate("xy")}
    plain_tables = {
        name: {path: replace(change, magnitude=None) for path, change in adapter.tables.items()}
        for name, adapter in made.items()
    }
    return {name: replace(adapter, tables=plain_tables[name]) for name, adapter in made.items()}


@pytest.mark.parametrize(("family", "size"), [("llama", 2), ("llama-biased-tied", 4)])
def test_adapters(tmp_path, family, size):
    folder = folder_of(tmp_path, family, **{**SIZES, "num_hidden_layers": 1})
    asked = [
        asking("none"),
        asking("x", [Adapter("x")]),
        asking("both", [Adapter("y"), Adapter("x", 0.5, 9)], 15),
    ]
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 40, "max_num_batched_tokens": 64}
    one = adapted_core(folder, "graph", adapters_of(folder), **options, max_num_seqs=1)
    expected = plain(one, asked)
    one.close()
    ranks = adapted_core(folder, "graph", adapters_of(folder), **options, max_num_seqs=4, tensor_parallel=size)
    same(expected, answers(ranks, asked))
    assert len({str(answer.logprobs) for answer in expected.values()}) == len(asked)


def test_a_table_with_a_magnitude_is_refused(tmp_path):
    folder = folder_of(tmp_path, "llama", **{**SIZES, "num_hidden_layers": 1})
    core = graph_core(folder, tensor_parallel=2)
    model = load_model(find_model(folder), device="cpu", options=LoadOptions("eager")).model
    adapter = computed(everything(model, 0))
    tables = {path: replace(change, magnitude=np.ones(64, np.float32)) for path, change in adapter.tables.items()}
    with pytest.raises(UnsupportedModel, match="magnitude of 'embed'"):
        core.runner.executor.pack_adapter(replace(adapter, tables=tables))  # type: ignore[attr-defined]
    core.close()


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGSTOP])
def test_the_loss_of_a_rank_ends_the_engine(tmp_path, signal_):
    core = graph_core(folder_of(tmp_path, "llama", **SIZES), tensor_parallel=2)
    [rank] = ranks_of()
    core.add(replace(requests()[1], params=SamplingParams(max_tokens=100, seed=1, ignore_eos=True)))
    threading.Timer(2.0, os.kill, (rank.pid, signal_)).start()
    with pytest.raises(DeviceFault, match="rank"):
        while core.has_work():
            core.step()
    core.close()
    assert not ranks_of()


# -- refusals ------------------------------------------------------------------------------------------


def test_what_ranks_of_graphs_cannot_do_is_refused(tmp_path):
    folder = folder_of(tmp_path, "llama", **SIZES)
    with pytest.raises(ConfigError, match="does not quantize"):
        graph_core(folder, tensor_parallel=2, quantize="q4")
    assert not ranks_of()


def test_a_model_that_only_the_eager_executor_runs_is_refused(tmp_path):
    folder = folder_of(tmp_path, "qwen3-next", num_hidden_layers=4)
    with pytest.raises((ConfigError, UnsupportedModel)):
        core_of(folder, executor="graph", device="cpu", tensor_parallel=2)
    assert not ranks_of()
