import pytest
import torch

from kvasir.caches import PagedKV, State, Window
from kvasir.layers.kv_cache import KVCache
from kvasir.layers.kv_layout import cache_groups

FULL, WINDOW, WIDE = PagedKV(2, 8), Window(2, 8, window=32), PagedKV(4, 8)
STATE = State((3, 5, 7), inputs=11, before=3)
SPEC = (FULL, WINDOW, FULL, WIDE, WINDOW)


def test_layers_of_equal_reach_share_a_table():
    """Whatever the sizes of their heads."""
    groups = cache_groups(SPEC, 16, "bfloat16")
    assert [(g.kind.name, g.layers, g.kind.reach) for g in groups] == [("full", (0, 2, 3), 0), ("window", (1, 4), 32)]
    assert [g.bytes_per_block for g in groups] == [2 * heads * 16 * 8 * 2 for heads in (2 + 2 + 4, 2 + 2)]


def test_bytes_per_block_is_what_the_tensors_take():
    cache = KVCache(SPEC, [5, 7], 16, torch.float32)
    for group, blocks in enumerate((5, 7)):
        tensors = [tensor for _, own in cache.of_group(group) for tensor in own]
        assert sum(tensor.nbytes for tensor in tensors) == blocks * cache.bytes_per_block(group)
    assert cache.k(4).shape == (7, 16, 2, 8)
    assert cache.v(3).shape == (5, 16, 4, 8)


def test_every_layer_has_its_own_place():
    cache = KVCache(SPEC, [3, 3], 16, torch.float32)
    cache.fill_(0.0)
    for layer, spec in enumerate(SPEC):
        rows = torch.full((1, spec.heads, 8), layer + 1.0)
        cache.store(layer, torch.tensor([2 * 16 + 5]), rows, -rows)
    for layer in range(len(SPEC)):
        for tensor, sign in ((cache.k(layer), 1), (cache.v(layer), -1)):
            assert (tensor[2, 5] == sign * (layer + 1)).all()
            assert tensor.count_nonzero() == tensor[2, 5].numel()


def test_copies_read_all_before_they_write_any():
    cache = KVCache((FULL, FULL), [4], 16, torch.float32)
    for block in range(4):
        cache.tensors[0][:, :, block] = float(block)
    cache.copy(0, [(1, 2), (2, 1), (2, 3)])
    cache.copy(0, [])
    assert cache.tensors[0][:, :, :, 0, 0, 0].tolist() == [[[0.0, 2.0, 1.0, 2.0]] * 2] * 2


def test_a_size_for_every_group():
    with pytest.raises(ValueError, match=r"1 .* 2"):
        KVCache(SPEC, [4], 16, torch.float32)


def test_states_are_blocks_of_float32():
    """Whatever the type of keys and values; only the block of the token before is still needed."""
    spec = (STATE, FULL, STATE)
    groups = cache_groups(spec, 16, "bfloat16")
    assert [(g.kind.name, g.layers, g.kind.reach) for g in groups] == [("state", (0, 2), 2), ("full", (1,), 0)]
    cache = KVCache(spec, [5, 7], 16, torch.bfloat16)
    assert groups[0].bytes_per_block == 2 * 4 * (3 * 5 * 7 + (3 + 16) * 11) == cache.tensors[0].nbytes / 5
    assert cache.state(2).shape == (5, 3, 5, 7) and cache.inputs(0).shape == (5, 19, 11)
    assert cache.state(0).dtype == cache.inputs(0).dtype == torch.float32


def test_a_state_and_its_inputs_lie_beside_each_other():
    cache = KVCache((STATE, STATE), [4], 16, torch.float32)
    cache.fill_(0.0)
    cache.state(1)[2] = 1.0
    cache.inputs(1)[2] = 2.0
    assert cache.state(1).sum() == 3 * 5 * 7 and cache.inputs(1).sum() == 2 * 19 * 11
    assert not cache.state(0).any() and not cache.inputs(0).any()
    cache.copy(0, [(2, 3)])
    assert (cache.state(1)[3] == 1).all() and (cache.inputs(1)[3] == 2).all()


def test_a_reach_beyond_a_block_fails_an_assertion():
    with pytest.raises(AssertionError, match="before"):
        KVCache((State((1,), inputs=1, before=17),), [4], 16, torch.float32)
