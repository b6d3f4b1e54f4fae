"""make() builds the runner that the options select: cache, executor and grade."""

import pytest

from kvasir.config import DeviceFacts, EngineOptions, ModelFacts
from kvasir.errors import ConfigError
from kvasir.memory import Footprint
from kvasir.ops import native
from kvasir.plan import Capacity, Join, SamplingSpec, StepPlan, Work, pack_ids
from kvasir.resolve import resolve
from kvasir.runner.load import LoadOptions, load_model
from kvasir.runner.make import cache_groups_of, make_runner
from kvasir.types import ModelInfo
from tests.runner.made import files_of

EXECUTORS = ["eager", pytest.param("program", marks=pytest.mark.skipif(not native.available(), reason=native.reason()))]


def needs_native(*values):
    return pytest.param(*values, marks=pytest.mark.skipif(not native.available(), reason=native.reason()))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return files_of(tmp_path_factory.mktemp("gemma3"), "gemma3")


def made(files, executor: str, kv_dtype: str = "float32", **options):
    loaded = load_model(files, "float32", options=LoadOptions(executor))
    given = EngineOptions(
        model="m", kv_dtype=kv_dtype, block_size=16, num_blocks=9, max_num_seqs=3, threads=1, **options
    )
    groups = cache_groups_of(loaded, 16, kv_dtype)
    facts = ModelFacts(256, "float32", False, groups, executor=executor, footprint=lambda tokens: Footprint())
    config = resolve(given, facts, DeviceFacts("cpu", 1 << 34, 1, 1, 1 << 34))
    capacity = Capacity(
        config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len, 16, groups, config.num_blocks, 96
    )
    return make_runner(loaded, config, capacity, ModelInfo("m", "m", ("generate",), 96, 256))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_runner_computes_with_the_sizes_of_its_config(files, executor, overlap):
    runner = made(files, executor, overlap=overlap)
    assert runner.overlaps == overlap
    assert runner.info.grade in ("exact", "close") and runner.capacity.max_rows == 3
    assert runner.cache.num_blocks == runner.capacity.num_blocks and runner.cache.block_size == 16
    joined = Join(0, pack_ids([5, 6, 7]), 3, SamplingSpec(logprobs=0))
    plan = StepPlan(0, joined=(joined,), work=(Work(0, 0, 3, ((0, (1,)), (0, (1,))), sample=True),))
    (row,) = runner.sample(runner.execute(plan)).rows
    assert len(row.tokens) == 1 and 0 <= row.tokens[0] < 96 and not row.error
    runner.close()
    runner.close()


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_block_bytes_equal_the_bytes_of_the_cache(files, executor, kv_dtype):
    groups = cache_groups_of(load_model(files, "float32", options=LoadOptions(executor)), 16, kv_dtype)
    runner = made(files, executor, kv_dtype)
    assert runner.cache.groups == groups == runner.capacity.groups
    total = sum(group.bytes_per_block * n for group, n in zip(groups, runner.capacity.num_blocks, strict=True))
    assert sum(tensor.nbytes for tensor in runner.cache.tensors) == total
    runner.close()


@pytest.mark.parametrize(
    ("executor", "kv_dtype"), [("eager", "int8"), ("eager", "int3"), ("eager", "fp8"), needs_native("program", "fp8")]
)
def test_a_kv_dtype_that_the_executor_lacks_is_named(files, executor, kv_dtype):
    with pytest.raises(ConfigError, match=kv_dtype):
        cache_groups_of(load_model(files, "float32", options=LoadOptions(executor)), 16, kv_dtype)


def test_blocks_are_copied_in_the_background_only_with_a_tier(files, monkeypatch):
    closed = []

    class Copies:
        def close(self):
            closed.append(True)

    monkeypatch.setattr("kvasir.runner.make_eager.copier", lambda device, num_bytes: Copies())
    made(files, "eager", cache_host=0).close()
    assert not closed
    made(files, "eager", cache_peer="/tmp/kvasir-peer").close()
    assert closed


@pytest.mark.parametrize(("streams", "asked", "tokens"), [(False, None, 512), (True, None, 2048), (True, 64, 64)])
def test_steps_that_read_weights_hold_more_tokens(files, streams, asked, tokens):
    groups = cache_groups_of(load_model(files, "float32", options=LoadOptions("eager")), 64, "float32")
    facts = ModelFacts(256, "float32", False, groups, footprint=lambda tokens: Footprint(), streams=streams)
    options = EngineOptions("m", max_num_batched_tokens=asked)
    assert resolve(options, facts, DeviceFacts("cpu", 1 << 34, 1)).max_num_batched_tokens == tokens
