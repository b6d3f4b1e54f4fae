"""The disk tier under real models: an engine over the folder of another one gives the same tokens and logprob bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir.engine.core import EngineCore
from kvasir.errors import ConfigError
from kvasir.ops import native
from tests.engine.cores import core_of, random_model
from tests.kv._tiers import until
from tests.oracle import mixed_requests, plain, poison, same, together
from tests.runner.made import request

torch = pytest.importorskip("torch")

needs_native = pytest.mark.skipif(not native.available(), reason=native.reason())
CASES = [
    *(pytest.param("llama", "program", {"kv_dtype": kv}, marks=needs_native) for kv in ("float32", "int8")),
    *(pytest.param("gemma3", "program", {"dtype": d}, marks=needs_native) for d in ("float32", "bfloat16")),
    pytest.param("gemma4", "program", {"kv_dtype": "int8"}, marks=needs_native),  # layers without blocks of their own
    *(
        pytest.param(model, "program", {"kv_dtype": "int8"}, marks=[needs_native, pytest.mark.slow])
        for model in ("deepseek-v2", "mimo-v2-flash")
    ),
    pytest.param("deepseek-v2", "eager", {"dtype": "float32"}, marks=pytest.mark.slow),
    pytest.param("llama", "eager", {"dtype": "float32"}, marks=pytest.mark.slow),
    ("mistral", "eager", {"dtype": "bfloat16"}),
    ("qwen3-next", "eager", {"dtype": "float32"}),
]


@pytest.fixture(autouse=True)
def _computing_is_slow(monkeypatch):
    """These models are computed faster than any disk is read: for the tier they take long."""
    monkeypatch.setattr("kvasir.sched.service.Service.prefill_seconds", lambda self, start, tokens: 30.0)


def make(folder: str, executor: str, options: dict, **more) -> EngineCore:
    options = {"num_blocks": 40, **options, **more}
    return core_of(folder, executor=executor, threads=1, block_size=16, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "executor", "options"), CASES)
def test_a_restarted_engine_finds_cached_prefixes(tmp_path, model, executor, options):
    made = tmp_path / "model"
    made.mkdir()
    folder, disk = random_model(model, made), str(tmp_path / "kv")
    requests = mixed_requests(300, 256, longest=150)
    expected = plain(make(folder, executor, options), requests)

    first = make(folder, executor, options, cache_dir=disk, num_blocks=60)
    same(expected, together(first, requests))
    first.close(30.0)
    assert first.stats().tier_saves["saved"] > 10

    second = make(folder, executor, options, cache_dir=disk)
    poison(second, [set(range(pool.num_blocks)) for pool in second.scheduler.kv.pools])
    same(expected, together(second, requests, seed=2))
    assert second.stats().tier_loaded_tokens > 100
    assert set(second.stats().tier_loads) == {"loaded"}
    second.close()


@pytest.mark.parametrize(
    ("executor", "overlap"),
    [
        pytest.param("eager", True, marks=pytest.mark.slow),
        *(pytest.param("program", overlap, marks=needs_native) for overlap in (False, True)),
    ],
)
def test_many_evictions_change_no_answer(tmp_path, executor, overlap):
    """Ten requests again and again through a pool for two, with forced preemption."""
    made = tmp_path / "model"
    made.mkdir()
    folder, options = random_model("llama", made), {"dtype": "float32", "overlap": overlap, "num_blocks": 13}
    requests = mixed_requests(300, 200, longest=150)
    expected = plain(make(folder, executor, {"dtype": "float32"}), requests)
    core = make(folder, executor, options, cache_dir=str(tmp_path / "kv"), max_num_seqs=6)
    for turn in range(3):
        same(expected, together(core, requests, seed=turn, preempt=0.1))
        store = core.scheduler.store
        assert store
        until(lambda store=store: store.tier.stats().queued_bytes == 0)
    stats = core.stats()
    assert stats.tier_loaded_tokens > 200 and stats.evicted_blocks > 50
    core.close()


def test_other_weights_find_nothing(tmp_path):
    """Of the same shape, in the same folder, for the same ids."""
    cores = []
    for seed in (1, 2):
        made = tmp_path / str(seed)
        made.mkdir()
        core = make(random_model("llama", made, seed), "auto", {}, cache_dir=str(tmp_path / "kv"))
        plain(core, [request("a", range(100))])
        core.close(30.0)
        cores.append(core)
    assert [c.stats().tier_saves.get("saved") for c in cores] == [6, 6]
    assert cores[1].stats().tier_loads == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_disk": 1 << 20}, "cache_disk without cache_dir"),
        ({"cache_dir": "x", "prefix_cache": False}, "--no-prefix-cache"),
        ({"cache_dir": "x", "cache_disk": 0}, "cache_disk is 0"),
        ({"cache_write_share": 0.5}, "cache_write_share without cache_dir"),
        ({"cache_dir": "x", "cache_write_share": 0.0}, "cache_write_share is 0.0"),
    ],
)
def test_contradictory_disk_tier_options_are_refused(options, message):
    with pytest.raises(ConfigError) as error:
        core_of("kvasir-mini", **options)
    assert message in f"{error.value} {error.value.hint}"


def test_a_folder_open_to_others_is_refused(tmp_path):
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o755)
    Path(folder).chmod(0o755)
    with pytest.raises(ConfigError, match=str(folder)):
        core_of("kvasir-mini", cache_dir=str(folder))
