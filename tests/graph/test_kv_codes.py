"""The graph executor with keys and values in int8 and fp8."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

import torch

from kvasir.engine.tier import group_facts
from kvasir.layers.kv_cache import KVCache
from kvasir.resolve import resolve
from kvasir.types import Request, SamplingParams
from tests.graph.models import folder_of, graph_core
from tests.graph.test_against_eager import prompt_logprobs
from tests.kv._tiers import until
from tests.oracle import Answer, plain, poison, same, together

CODED = ["int8", "fp8"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def cache_of(core: Any) -> KVCache:
    return core.runner.cache


@pytest.mark.parametrize(("kv_dtype", "mean"), [("int8", 0.02), ("fp8", 0.06)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_prompt_logprobs_are_close_to_those_of_a_cache_of_floats(tmp_path, kv_dtype, mean, dtype):
    folder = folder_of(tmp_path, "llama")
    prompt = tuple((7 * i * i + 3 * i) % 96 for i in range(1, 41))
    expected = prompt_logprobs(graph_core(folder, dtype=dtype), prompt)
    error = np.abs(prompt_logprobs(graph_core(folder, dtype=dtype, kv_dtype=kv_dtype), prompt) - expected)
    assert 0 < error.mean() < mean and error.max() < 5 * mean


@pytest.mark.parametrize("kv_dtype", CODED)
def test_a_block_takes_the_bytes_of_codes_and_scales(tmp_path, kv_dtype):
    core = graph_core(folder_of(tmp_path, "llama"), kv_dtype=kv_dtype)
    cache = cache_of(core)
    (group,) = cache.groups
    heads, dim = group.kind.heads, group.kind.key_dim
    assert group.bytes_per_block == 2 * 2 * 16 * heads * (dim + 4) == cache.export(0, 0).nbytes
    assert sum(tensor.nbytes for tensor in cache.tensors) == 40 * group.bytes_per_block
    assert any(f", {kv_dtype}, " in line for line in core.summary)


def test_stores_tell_the_types_apart(tmp_path):
    folder, facts = folder_of(tmp_path, "llama"), set()
    for kv_dtype in ("float16", *CODED):
        core = graph_core(folder, kv_dtype=kv_dtype)
        config: Any = SimpleNamespace(kv_dtype=kv_dtype)
        facts.add(group_facts(config, cache_of(core))[0].layout)
    assert len(facts) == 3 and sum("scale" in layout for layout in facts) == 2


@pytest.mark.parametrize("kv_dtype", CODED)
def test_evicted_blocks_come_back_from_the_host_tier(tmp_path, monkeypatch, kv_dtype):
    """With their codes and scales; what they held before is overwritten."""
    monkeypatch.setattr("kvasir.engine.build.resolve", lambda *facts: replace(resolve(*facts), cache_host=64 << 20))
    monkeypatch.setattr("kvasir.sched.service.Service.prefill_seconds", lambda self, start, tokens: 30.0)
    folder, options = folder_of(tmp_path, "llama"), {"kv_dtype": kv_dtype, "dtype": "bfloat16"}
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=1, seed=0, ignore_eos=True)
    asked = [Request(f"r{i}", tuple((5 * i + 3 * t) % 96 for t in range(40)), params) for i in range(2)]
    expected = plain(graph_core(folder, **options, max_num_seqs=1), asked)
    core = graph_core(folder, **options)
    same(expected, together(core, asked))
    scheduler = core.scheduler
    assert scheduler.store
    tier = scheduler.store.tier
    for plan in scheduler.last_plans():
        scheduler.commit(plan, core.runner.sample(core.runner.execute(plan), scheduler.masks(plan)))
    until(lambda: tier.stats().queued_bytes == 0)
    scheduler.kv.tree.clear()
    poison(core, [set(range(pool.num_blocks)) for pool in scheduler.kv.pools])
    before = core.stats().tier_loaded_tokens
    same(expected, together(core, asked, seed=2))
    assert core.stats().tier_loaded_tokens >= before + 64


@pytest.mark.parametrize("kv_dtype", CODED)
def test_a_token_that_is_not_finite_ends_its_sequence_alone(tmp_path, kv_dtype):
    """It has scales of NaN, which all later tokens of its sequence read."""
    folder, params = folder_of(tmp_path, "llama"), SamplingParams(temperature=0.0, max_tokens=4, logprobs=1, seed=0)
    good, bad = Request("good", tuple(range(20, 40)), params), Request("bad", (3, 90, *range(5, 23)), params)
    expected = plain(graph_core(folder, kv_dtype=kv_dtype), [good])["good", 0]
    core, answer, errors = graph_core(folder, kv_dtype=kv_dtype), Answer(), []
    runner: Any = core.runner
    runner.executor.model.embed.weight.data[90] = torch.nan
    core.add(good)
    core.add(bad)
    while core.has_work():
        for delta in core.step():
            if delta.id == "good":
                answer.take(delta)
            else:
                errors.append(delta.error)
    assert len(errors) == 1 and "logits" in errors[0]
    assert answer == expected
