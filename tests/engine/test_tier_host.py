"""The host tier under real models: what falls out of a pool and comes back gives the same tokens and logprob bits.

On the CPU no engine makes one by default, since the pool is host memory already: here the option requests it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvasir.caches import PagedKV
from kvasir.config import DeviceFacts, EngineOptions, ModelFacts
from kvasir.engine.core import EngineCore
from kvasir.errors import ConfigError
from kvasir.ops import native
from kvasir.plan import CacheGroup
from kvasir.resolve import resolve
from tests.engine.cores import core_of, random_model
from tests.kv._tiers import until
from tests.oracle import mixed_requests, plain, poison, same, together

torch = pytest.importorskip("torch")

needs_native = pytest.mark.skipif(not native.available(), reason=native.reason())
CASES = [
    pytest.param("llama", "program", {"kv_dtype": "int8"}, marks=needs_native),
    pytest.param("gemma3", "program", {"dtype": "float32"}, marks=needs_native),
    pytest.param("llama", "eager", {"dtype": "float32"}, marks=pytest.mark.slow),
    pytest.param("mistral", "eager", {"dtype": "bfloat16"}, marks=pytest.mark.slow),
    pytest.param("qwen3-next", "eager", {"dtype": "float32"}, marks=pytest.mark.slow),
]
LARGE = 64 << 20


@pytest.fixture(autouse=True)
def host_bytes(monkeypatch):
    """What the next engine takes of the host's memory. Computing is believed to take long."""
    size = [LARGE]
    monkeypatch.setattr("kvasir.engine.build.resolve", lambda *facts: replace(resolve(*facts), cache_host=size[0]))
    monkeypatch.setattr("kvasir.sched.service.Service.prefill_seconds", lambda self, start, tokens: 30.0)
    return size


def make(folder: str, executor: str, options: dict, **more) -> EngineCore:
    return core_of(folder, executor=executor, threads=1, block_size=16, **{"num_blocks": 40, **options, **more})


def forget(core: EngineCore) -> None:
    """Nothing is in the pool any more: all that was has fallen into the tier."""
    scheduler = core.scheduler
    for plan in scheduler.last_plans():
        result = core.runner.sample(core.runner.execute(plan), scheduler.masks(plan))
        scheduler.commit(plan, result)
    assert scheduler.store
    until(lambda: scheduler.store.tier.stats().queued_bytes == 0)
    scheduler.kv.tree.clear()
    poison(core, [set(range(pool.num_blocks)) for pool in scheduler.kv.pools])


@pytest.mark.parametrize(("model", "executor", "options"), CASES)
def test_evicted_blocks_come_back_from_the_host_tier(tmp_path, host_bytes, model, executor, options):
    folder, requests = random_model(model, tmp_path), mixed_requests(300, 256, longest=150)
    core = make(folder, executor, options)
    assert any(line.startswith("host ") for line in core.summary)
    host_bytes[0] = 0
    expected = plain(make(folder, executor, options), requests)
    same(expected, together(core, requests))
    forget(core)
    before = core.stats().tier_loaded_tokens
    same(expected, together(core, requests, seed=2))
    assert core.stats().tier_loaded_tokens > before + 100
    assert set(core.stats().tier_loads) == {"loaded"}
    assert list(core.stats().tiers) == ["host"]


@pytest.mark.parametrize(
    ("executor", "overlap"),
    [
        pytest.param("eager", True, marks=pytest.mark.slow),
        *(pytest.param("program", overlap, marks=needs_native) for overlap in (False, True)),
    ],
)
def test_a_storm_of_evictions_through_host_and_disk(tmp_path, host_bytes, executor, overlap):
    """Ten requests again and again through a pool for two, above host memory for some blocks, above a disk."""
    made = tmp_path / "model"
    made.mkdir()
    folder, requests = random_model("llama", made), mixed_requests(300, 200, longest=150)
    plain_options = {"dtype": "float32"}
    host_bytes[0] = 0
    expected = plain(make(folder, executor, plain_options), requests)
    host_bytes[0] = 20 * 2 * 2 * 2 * 16 * 16 * 4  # blocks of two layers
    options = {**plain_options, "overlap": overlap, "num_blocks": 13, "cache_dir": str(tmp_path / "kv")}
    core = make(folder, executor, options, max_num_seqs=6)
    for turn in range(3):
        same(expected, together(core, requests, seed=turn, preempt=0.1))
        store = core.scheduler.store
        assert store
        until(lambda store=store: store.tier.stats().queued_bytes == 0)
        assert store.tier.each()["host"].num_bytes <= host_bytes[0]
    tiers = core.stats().tiers
    assert tiers["host"].loads["loaded"] > 5 and tiers["host"].evicted > 20
    assert tiers["disk"].loads["loaded"] > 5
    core.close(30.0)
    host_bytes[0] = LARGE
    second = make(folder, executor, options, max_num_seqs=6)
    same(expected, together(second, requests, seed=5))
    assert second.stats().tiers["disk"].loads["loaded"] > 5, "at its end an engine writes what the host holds"
    second.close()


def decided(monkeypatch, kind: str, **options) -> int:
    monkeypatch.undo()
    facts = ModelFacts(1024, "float32", False, (CacheGroup(PagedKV(), (0,), 1024),))
    return resolve(EngineOptions("m", **options), facts, DeviceFacts(kind, 1 << 34, 4, 4, 10 << 30)).cache_host


def test_the_default_size_of_the_host_tier(monkeypatch):
    assert decided(monkeypatch, "cpu") == decided(monkeypatch, "cpu", cache_host=0) == 0
    assert decided(monkeypatch, "cuda") == 5 << 30
    assert decided(monkeypatch, "cuda", host_share=0.25) == 5 << 28, "of several that share the machine"
    assert decided(monkeypatch, "cuda", host_share=0.25, cache_host=1 << 20) == 1 << 20
    assert decided(monkeypatch, "cpu", host_share=0.25) == 0
    assert decided(monkeypatch, "cuda", cache_host=1 << 20) == 1 << 20
    assert decided(monkeypatch, "cuda", cache_host=0) == decided(monkeypatch, "cuda", prefix_cache=False) == 0


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("cpu", {"cache_host": 1 << 20}, "CPU"),
        ("cuda", {"cache_host": 11 << 30}, "lower it"),
        ("cuda", {"cache_host": -1}, "cache_host is -1"),
        ("cuda", {"cache_host": 1, "prefix_cache": False}, "--no-prefix-cache"),
    ],
)
def test_contradictory_host_tier_options_are_refused(monkeypatch, kind, options, message):
    with pytest.raises(ConfigError) as error:
        decided(monkeypatch, kind, **options)
    assert message in f"{error.value} {error.value.hint}"
