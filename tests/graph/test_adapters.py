"""Adapters on the graph executor: their places and launches, what is refused, and memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

import torch

from kvasir.errors import ConfigError, UnsupportedModel
from kvasir.graph import adapter_places
from kvasir.graph.adapter_places import Places
from kvasir.graph.adapters import MAX_ADAPTERS
from kvasir.graph.fold import fold
from kvasir.layers.adapters import head_slot, slots
from kvasir.lora import TokenRows
from kvasir.ops.graph import CannotTrace
from kvasir.ops.launch import recording
from kvasir.ops.linear.triton_low_rank import MAX_RANK
from kvasir.runner.graph_memory import graph_memory
from kvasir.runner.load import LoadOptions, load_model
from kvasir.weights.find import find_model
from tests.graph.models import folder_of, graph_core
from tests.layers.adapted import adapter_of
from tests.lora.adapters import give

RANK = 4


def pairs_of(core, seed: int) -> dict:
    """Random matrices for all slots."""
    rng, rank, pairs = np.random.default_rng(seed), RANK, {}
    for slot, (linear, part) in slots(core.runner.executor.model).items():
        a = rng.standard_normal((rank, linear.inputs), np.float32) * linear.inputs**-0.5
        b = rng.standard_normal((linear.outputs[part], rank), np.float32) * rank**-0.5
        pairs[slot] = a, b, 0.5
    return pairs


def adapted(core):
    """The core with an adapter of all slots, whose id is 1."""
    give(core.runner, 1, pairs_of(core, 1))
    return core


def test_only_steps_with_an_adapter_launch_its_kernels(tmp_path):
    core = adapted(graph_core(folder_of(tmp_path, "llama")))
    forward, counts = core.runner.executor.forward, {}
    for name in (False, True):
        with recording(dry=True) as launches:
            forward.run_rows(2, adapted=name)
        counts[name] = [launch.name for launch in launches]
    more = Counter(counts[True]) - Counter(counts[False])
    assert more == {"_find": 1, "_shrink": 8, "_grow": 8, "_change_lookup": 1, "_change_norm": 5}
    assert not Counter(counts[False]) - Counter(counts[True])


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "qwen3-moe", "llama-biased-tied"])
def test_every_slot_has_a_call(tmp_path, family):
    core = graph_core(folder_of(tmp_path, family), max_num_batched_tokens=None)
    executor = core.runner.executor
    places, names = executor.forward.places, {**slots(executor.model), **head_slot(executor.model)}
    assert {*places.slots} == {*names} and all(len(numbers) == 1 for numbers in places.numbers.values())
    biased = {name for name, (linear, part) in names.items() if part in linear.biases}
    assert {*places.biases} == biased and bool(biased) == (family == "llama-biased-tied")


def test_a_slot_whose_call_has_no_kernel_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(adapter_places, "_KINDS", ("qkv", "product", "linear"))
    folder = folder_of(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"no Triton kernel for an adapter of layers\.0\.mlp\.gate_up\.gate"):
        graph_core(folder)


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path):
    core = adapted(graph_core(folder_of(tmp_path, "llama")))
    good, adapters = pairs_of(core, 1), core.runner.executor.forward.adapters
    before = adapters.tables.clone()
    slot = "layers.1.mlp.down"
    a, b, scale = good[slot]
    for pair in ((a[:, 1:], b), (a, b[1:]), (a[:3], b), (a[0], b)):
        with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down needs A"):
            give(core.runner, 1, {"layers.0.attn.out": good["layers.0.attn.out"], slot: (*pair, scale)})
    wide = np.zeros((MAX_RANK + 1, a.shape[1])), np.zeros((b.shape[0], MAX_RANK + 1)), 1.0
    with pytest.raises(UnsupportedModel, match=f"a rank of {MAX_RANK + 1}"):
        give(core.runner, 1, {slot: wide})
    with pytest.raises(UnsupportedModel, match="a change of 'up', which the graph executor cannot compute"):
        give(core.runner, 1, {"up": (a, b, scale)})
    rows = np.zeros((1, core.runner.executor.model.head.inputs), np.float32)
    both = adapter_of({}, saved={"head.weight": rows.repeat(9, 0)}, tokens={"head": TokenRows((3,), rows)})
    with pytest.raises(UnsupportedModel, match="rows of 'head' and all of it"):
        core.runner.executor.pack_adapter(both)
    for adapter in (0, -1, MAX_ADAPTERS):
        with pytest.raises(ValueError, match="adapter ids"):
            give(core.runner, adapter, good)
    assert torch.equal(adapters.tables, before)


def test_memory_is_counted(tmp_path):
    folder = folder_of(tmp_path, "llama")
    core = graph_core(folder)
    options = LoadOptions("graph", block_size=16)
    loaded = load_model(find_model(folder), device="cpu", options=options)

    def counted(adapters: bool) -> int:
        found = {"tokens": 64, "rows": 4, "block_size": 16, "kv_dtype": "float32"}
        return graph_memory(loaded, **found, adapters=adapters)[0]

    forward = core.runner.executor.forward
    before = forward.num_bytes
    assert core.runner.executor.add_adapters().num_bytes == forward.num_bytes - before
    assert counted(True) - counted(False) == forward.num_bytes - before
    with pytest.raises(CannotTrace, match=r"adapter of layers\.0"):
        calls = [replace(call, kind="other") for call in fold(loaded.trace)]
        Places.of(loaded.trace, calls)
