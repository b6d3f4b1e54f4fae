"""Low-rank adapters on the graph executor: against the eager executor, and a row's bits beside any other's adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

import torch

from kvasir.errors import ConfigError, UnsupportedModel
from kvasir.graph import adapters as device_adapters
from kvasir.graph.adapters import MAX_ADAPTERS, changes_of
from kvasir.graph.fold import fold
from kvasir.inputs import Adapter
from kvasir.layers.adapters import slots
from kvasir.ops.graph import CannotTrace
from kvasir.ops.launch import recording
from kvasir.ops.linear.triton_low_rank import MAX_RANK
from kvasir.runner.graph_executor import GraphExecutor
from kvasir.runner.graph_memory import graph_memory
from kvasir.runner.load import LoadOptions, load_model
from kvasir.types import Request, SamplingParams
from kvasir.weights.find import find_model
from tests.engine.cores import core_of
from tests.graph.models import folder_of, graph_core
from tests.lora.adapters import give
from tests.oracle import free_blocks, plain, poison, same, together

NAMES = ("x", "y", "z")
RANKS = {1: 4, 2: 19, 3: 1}
TOLERANCE = {"float32": (2e-5, 2e-4), "bfloat16": (0.03, 0.6)}  # as in test_against_eager
PROMPT = tuple((7 * i * i + 3 * i) % 96 for i in range(1, 41))


def pairs_of(core, adapter: int, only: str = "") -> dict:
    """Random matrices for the slots whose names contain `only`."""
    rng, rank, pairs = np.random.default_rng(adapter), RANKS[adapter], {}
    for slot, (linear, part) in slots(core.runner.executor.model).items():
        a = rng.standard_normal((rank, linear.inputs), np.float32) * linear.inputs**-0.5
        b = rng.standard_normal((linear.outputs[part], rank), np.float32) * rank**-0.5
        if only in slot:
            pairs[slot] = a, b, 0.5
    assert pairs
    return pairs


def adapted(core, adapters: Mapping[int, str]):
    """The core with adapters for the slots whose names contain a text."""
    core.scheduler.capacity = replace(core.scheduler.capacity, adapters=NAMES)
    for adapter, only in adapters.items():
        give(core.runner, adapter, pairs_of(core, adapter, only))
    return core


def asking(id: str, name: str = "", prompt=PROMPT, **params) -> Request:
    params = {"temperature": 0.0, "max_tokens": 1, "seed": 0, "ignore_eos": True, **params}
    return Request(id, prompt, SamplingParams(**params), adapters=(Adapter(name),) if name else ())


def prompt_logprobs(core, name: str) -> np.ndarray:
    core.add(asking("r", name, prompt_logprobs=1))
    found = []
    while core.has_work():
        for delta in core.step():
            assert delta.error is None, delta.error
            if delta.prompt_logprobs is not None:
                found += [(entry.logprob, entry.top[0][1]) for entry in delta.prompt_logprobs if entry]
    return np.array(found)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", "float32"),
        ("llama", "bfloat16"),
        ("gemma2", "float32"),
        ("llama-biased-tied", "float32"),
        ("mixtral", "float32"),
    ],
)
def test_prompt_logprobs_are_those_of_the_eager_executor(family, dtype, tmp_path):
    folder = folder_of(tmp_path, family)
    eager = core_of(folder, dtype=dtype, executor="eager", threads=1, block_size=16)
    expected = prompt_logprobs(adapted(eager, {2: ""}), "y")
    core = adapted(graph_core(folder, dtype=dtype), {2: ""})
    got = prompt_logprobs(core, "y")
    (mean, most), error = TOLERANCE[dtype], np.abs(got - expected)
    assert error.mean() < mean and error.max() < most
    assert np.abs(got - prompt_logprobs(core, "")).mean() > 10 * mean, "the adapter changed nothing"


REQUESTS = [
    asking("x", "x", PROMPT[:17], max_tokens=4, logprobs=1, prompt_logprobs=0),
    asking("none", "", PROMPT[:5], max_tokens=5, logprobs=1, prompt_logprobs=0),
    asking("y", "y", PROMPT[:17], max_tokens=4, logprobs=1, temperature=0.8),
    asking("also x", "x", PROMPT[3:9], max_tokens=6, logprobs=1, temperature=0.7),
    asking("z", "z", PROMPT[:17], max_tokens=4, logprobs=1),
]
ADAPTERS = {1: "", 2: "", 3: "layers.1.attn"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_have_the_same_bits_alone_and_beside_any_adapters(tmp_path, dtype):
    folder = folder_of(tmp_path, "llama")
    expected = {}
    for request in REQUESTS:  # in engines that know no adapter but the request's own
        own = {i: only for i, only in ADAPTERS.items() if (Adapter(NAMES[i - 1]),) == request.adapters}
        core = graph_core(folder, dtype=dtype, max_num_seqs=1)
        expected |= plain(adapted(core, own), [request])
        assert (core.runner.executor.forward.adapters is None) == (not own)
    core = adapted(graph_core(folder, dtype=dtype, max_num_batched_tokens=29, max_chunk=13), ADAPTERS)

    def poisoned(core):
        if not core.scheduler.running:
            poison(core, free_blocks(core))

    same(expected, together(core, REQUESTS, preempt=0.1, each_step=poisoned))
    tokens = {tuple(answer.tokens) for key, answer in expected.items() if key[0] in ("x", "z")}
    logprobs = {str(answer.logprobs) for key, answer in expected.items() if key[0] in ("x", "z")}
    assert len(logprobs) == 2 or len(tokens) == 2, "the adapters changed nothing"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_adapters_come_change_and_go_without_new_recordings(tmp_path):
    core = graph_core(folder_of(tmp_path, "llama"), prefix_cache=False)  # its prefixes are by name, not by content
    executor = core.runner.executor
    assert isinstance(executor, GraphExecutor)

    def answer(name: str) -> str:
        [found] = plain(core, [asking("r", name, PROMPT[:7], max_tokens=2, logprobs=0)]).values()
        return str((found.tokens, found.logprobs))

    core.scheduler.capacity = replace(core.scheduler.capacity, adapters=NAMES)
    none = answer("")
    give(core.runner, 1, pairs_of(core, 1))
    first, replays = answer("x"), dict(executor.replays._recorded)
    give(core.runner, 2, pairs_of(core, 2))
    give(core.runner, 1, pairs_of(core, 3))
    changed, other = answer("x"), answer("y")
    give(core.runner, 1, pairs_of(core, 1))
    assert answer("x") == first and answer("y") == other and answer("") == none
    give(core.runner, 1, {})
    assert answer("x") == none and answer("y") == other
    assert len({none, first, changed, other}) == 4
    assert {key: executor.replays._recorded[key] for key in replays} == replays


def test_only_steps_with_an_adapter_launch_its_kernels(tmp_path):
    core = adapted(graph_core(folder_of(tmp_path, "llama")), {1: ""})
    forward, counts = core.runner.executor.forward, {}
    for name in (False, True):
        with recording(dry=True) as launches:
            forward.run_rows(2, adapted=name)
        counts[name] = [launch.name for launch in launches]
    assert len(counts[True]) == len(counts[False]) + 2 * 4 * 2  # shrink and grow, of each product
    assert counts[True].count("_shrink") == counts[True].count("_grow") == 8
    assert not {"_shrink", "_grow"} & set(counts[False])


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "qwen3-moe", "llama-biased-tied"])
def test_every_slot_has_a_call(tmp_path, family):
    core = graph_core(folder_of(tmp_path, family), max_num_batched_tokens=None)
    executor = core.runner.executor
    names = [name for change in executor.add_adapters().changes.values() for name in change.names]
    assert sorted(names) == sorted(slots(executor.model)) and len(set(names)) == len(names)


def test_a_slot_whose_call_has_no_kernel_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(device_adapters, "_KINDS", ("qkv", "product", "linear"))
    folder = folder_of(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"no Triton kernel for an adapter of layers\.0\.mlp\.gate_up\.gate"):
        graph_core(folder)


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path):
    core = adapted(graph_core(folder_of(tmp_path, "llama")), {1: ""})
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
    with pytest.raises(UnsupportedModel, match="a change of head, which the graph executor cannot compute"):
        give(core.runner, 1, {"head": (a, b, scale)})
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
        changes_of(loaded.trace, calls)
