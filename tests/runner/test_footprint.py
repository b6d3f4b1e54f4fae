"""The memory that is counted before it is allocated."""

import pytest

from kvasir.layers.rope import Angles, ropes
from kvasir.ops import native
from kvasir.program.cache import NativeCache
from kvasir.program.program import Program
from kvasir.runner.footprint import footprint_of
from kvasir.runner.load import LoadOptions, load_model
from kvasir.speculation import MAX_DRAFTED
from tests.runner.made import files_of

OPTIONS = {"kind": "cpu", "tokens": 64, "rows": 8, "threads": 1, "block_size": 16, "kv_dtype": "float32"}
EXECUTORS = ["eager", pytest.param("program", marks=pytest.mark.skipif(not native.available(), reason=native.reason()))]


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    folders = {}

    def load(executor: str, family: str = "llama"):
        files = folders.get(family) or files_of(tmp_path_factory.mktemp(family), family)
        folders[family] = files
        return load_model(files, "float32", options=LoadOptions(executor))

    return load


@pytest.mark.parametrize("executor", EXECUTORS)
def test_weights_are_those_of_the_loaded_model(load, executor):
    loaded = load(executor)
    found = footprint_of(loaded, **OPTIONS)
    assert (found.weights, found.mapped) == (loaded.held, loaded.mapped)
    assert 0 <= found.mapped <= found.weights


@pytest.mark.skipif(not native.available(), reason=native.reason())
@pytest.mark.parametrize("tokens", [1, 64, 500])
def test_buffer_sizes_of_a_program_equal_its_allocations(load, tokens):
    """Whatever the size of the cache beside them."""
    loaded = load("program")
    spec = loaded.model.cache_spec()
    cache, sizes = NativeCache(spec, [9], 16, "float32"), {"max_rows": 8, "max_positions": 200, "threads": 1}
    program = Program(loaded.trace, cache, max_tokens=tokens, **sizes, max_drafted=MAX_DRAFTED)
    found = footprint_of(loaded, **{**OPTIONS, "tokens": tokens})
    assert found.buffers == program.num_bytes
    program.close()


def test_buffers_of_the_eager_executor_cover_what_a_step_allocates(load):
    """The residual stream, q, k, v, gate and up of each token row are below the bound, which grows with the rows."""
    loaded = load("eager")
    one, more = (footprint_of(loaded, **{**OPTIONS, "tokens": tokens}).buffers for tokens in (64, 128))
    c = loaded.model.config
    numbers = 2 * c.width + (c.heads + 2 * c.kv_heads) * c.head_dim + 3 * c.inner
    assert more - one >= 64 * 4 * numbers


@pytest.mark.parametrize("executor", EXECUTORS)
def test_every_rotary_embedding_is_counted_once(load, executor):
    loaded = load(executor, "gemma3")
    found = list(ropes(loaded.model))
    assert len({id(rope) for rope in found}) == len(found) == 2, "one for windows and one for all tokens"
    assert footprint_of(loaded, **OPTIONS).angles == sum(Angles.num_bytes(rope, 1) for rope in found)
    angles = Angles(found[0], 100)
    assert angles.cos.nbytes + angles.sin.nbytes == Angles.num_bytes(found[0], 100)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_rows_cost_their_ids_and_tables_at_each_position(load, executor):
    loaded = load(executor)
    few, many = (footprint_of(loaded, **{**OPTIONS, "rows": rows}).rows for rows in (8, 24))
    per_row = (many - few) / 16
    assert 4 < per_row <= 4 * (1 + 1), "an id, and a block id for 16 of them"


def test_sampling_on_a_gpu_takes_memory_for_all_rows_at_once(load):
    loaded = load("eager")
    cpu, cuda = (footprint_of(loaded, **{**OPTIONS, "kind": kind, "rows": 256}).samplers for kind in ("cpu", "cuda"))
    assert cuda > cpu >= 256 * 4 * loaded.model.config.vocab_size


@pytest.mark.parametrize("executor", EXECUTORS)
def test_nothing_is_allocated_by_counting(load, executor):
    loaded = load(executor)
    before = {id(rope): vars(rope).copy() for rope in ropes(loaded.model)}
    assert footprint_of(loaded, **OPTIONS) == footprint_of(loaded, **OPTIONS)
    assert {id(rope): vars(rope) for rope in ropes(loaded.model)} == before
