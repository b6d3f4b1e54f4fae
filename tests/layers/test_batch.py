import pytest
import torch

from kvasir.caches import PagedKV, State, Window
from kvasir.layers.batch import TILE, InputBuffers
from kvasir.layers.kv_cache import KVCache
from tests.layers.parts import Part
from tests.layers.parts import batch_of as make_batch

SPEC = (PagedKV(2, 8), Window(2, 8, window=20))


@pytest.fixture
def cache() -> KVCache:
    return KVCache(SPEC, [10, 10], 16, torch.float32)


def part(ids, start, *blocks, **options) -> Part:
    return Part(ids, start, blocks, **options)


def test_works_are_packed_and_filled_up(cache):
    batch = make_batch(
        [part([7, 8, 9], 15, [3, 4], [5, 6]), part([1], 0, [2], [9])],
        cache,
    )
    assert batch.num_tokens == 4
    assert batch.starts.tolist() == [0, 3, 4]
    fill = [0] * (TILE - 4)
    assert batch.tokens_T.tolist() == [7, 8, 9, 1, *fill]
    assert batch.positions_T.tolist() == [15, 16, 17, 0, *fill]
    assert batch.slots[0].tolist() == [3 * 16 + 15, 4 * 16, 4 * 16 + 1, 2 * 16, *fill]
    assert batch.slots[1].tolist() == [5 * 16 + 15, 6 * 16, 6 * 16 + 1, 9 * 16, *fill]


def test_a_full_tile_needs_no_filling(cache):
    assert len(make_batch([part(range(TILE), 0, [1, 2], [1, 2])], cache).tokens_T) == TILE


def test_work_is_planned_once_for_layers_of_a_kind(cache):
    batch = make_batch([part([7], 15, [3], [5])], cache)
    assert batch.attention(0, 2) is batch.attention(0, 2)
    assert batch.attention(0, 2) is not batch.attention(1, 2)


def test_blocks_before_a_window_may_be_stale(cache):
    """Position 40 sees 21 ..: block 0 of the window's table says nothing any more, of the full one's it does."""
    make_batch([part([7], 40, [1, 2, 3], [-1, 2, 3])], cache)
    make_batch([part([7], 40, [1, 2, 3], [99, 2, 3])], cache)
    with pytest.raises(AssertionError, match="range"):
        make_batch([part([7], 40, [99, 2, 3], [1, 2, 3])], cache)
    with pytest.raises(AssertionError, match="range"):
        make_batch([part([7], 40, [1, 2, 3], [1, 0, 3])], cache)


def test_a_state_needs_the_block_of_the_token_before():
    """Position 32 opens block 2 out of block 1, position 33 is in it, and what lies before is stale."""
    cache = KVCache((State((2,), inputs=3, before=3),), [10], 16, torch.float32)
    make_batch([part([7], 32, [99, 5, 6])], cache)
    make_batch([part([7], 33, [99, 99, 6])], cache)
    for start, stale in ((32, [4, 99, 6]), (33, [4, 5, 99])):
        with pytest.raises(AssertionError, match="range"):
            make_batch([part([7], start, stale)], cache)


def test_walks_are_planned_once_for_layers_of_a_kind():
    state = State((2,), inputs=3, before=3)
    cache = KVCache((state, SPEC[0], state), [10, 10], 16, torch.float32)
    batch = make_batch([part([7, 8], 15, [3, 4], [5, 6])], cache)
    assert batch.states(0) is batch.states(2)
    assert [stage.blocks.tolist() for stage in batch.states(0).groups[0].stages] == [[3], [4]]


def test_invalid_works_fail_an_assertion(cache):
    with pytest.raises(AssertionError, match=r"1 .* 16 .* 17"):
        make_batch([part([7, 8], 15, [3], [5])], cache)
    with pytest.raises(AssertionError, match="need tokens"):
        make_batch([part([], 15, [3], [5])], cache)
    with pytest.raises(AssertionError, match="needs works"):
        make_batch([], cache)


def test_inputs_have_fixed_addresses_and_are_cleared_each_step(cache):
    inputs = InputBuffers(40, 2)
    first = make_batch([part(range(1, 38), 0, [1, 2, 3], [1, 2, 3])], cache, inputs=inputs)
    where = first.tokens_T.data_ptr(), first.slots[1].data_ptr()
    alone = make_batch([part([7], 15, [3], [5])], cache)
    again = make_batch([part([7], 15, [3], [5])], cache, inputs=inputs)
    assert (again.tokens_T.data_ptr(), again.slots[1].data_ptr()) == where
    for name in ("tokens_T", "positions_T"):
        assert getattr(again, name).tolist() == getattr(alone, name).tolist()
    assert [slots.tolist() for slots in again.slots] == [slots.tolist() for slots in alone.slots]
