"""Blocks as bytes: what goes out comes back, for every kind of cache."""

import pytest
import torch

from kvasir.caches import PagedKV, State, Window
from kvasir.layers.kv_cache import KVCache

SPEC = (PagedKV(3, 6), Window(2, 8, window=40), State((3, 5), inputs=7, before=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("group", range(3))
def test_a_block_goes_out_and_comes_back(dtype, group):
    cache = KVCache(SPEC, [5, 5, 5], 16, dtype)
    for tensor in cache.tensors:
        tensor.view(torch.uint8).random_(0, 255)  # NaN of all kinds among them
    tensors = [tensor.view(torch.uint8) for _, own in cache.of_group(group) for tensor in own]
    assert len(tensors) == 1 + (cache.coded and group < 2)
    before = [tensor.clone() for tensor in tensors]
    data = cache.export(group, 2)
    assert data.nbytes == cache.bytes_per_block(group) == sum(tensor[:, :, 0].nbytes for tensor in tensors)
    assert data.readonly
    cache.import_(group, 4, data)
    for was, now in zip(before, tensors, strict=True):
        assert torch.equal(now[:, :, 4], was[:, :, 2])
        assert torch.equal(now[:, :, :4], was[:, :, :4])


@pytest.mark.parametrize(("dtype", "stored"), [(torch.int8, torch.int8), (torch.float8_e4m3fn, torch.uint8)])
def test_codes_are_exported_with_their_scales(dtype, stored):
    cache = KVCache((PagedKV(3, 6), PagedKV(2, 8, 4)), [3], 16, dtype)
    assert cache.order(0) == (
        "layer,key/value,head,token,dim+layer,key/value scale,head,token+"
        "layer,key,head,token,dim+layer,value,head,token,dim+layer,key scale,head,token+layer,value scale,head,token"
    )
    assert cache.bytes_per_block(0) == 16 * (2 * 3 * (6 + 4) + 2 * (8 + 4 + 2 * 4))
    for layer, (heads, e) in enumerate([(3, 6), (2, 4)]):
        scales = cache.scales(layer)
        assert scales
        k_scales, v_scales = scales
        assert cache.v(layer).shape == (3, 16, heads, e) and cache.k(layer).dtype == stored
        assert k_scales.shape == v_scales.shape == (3, heads, 16) and k_scales.dtype == torch.float32
        k_scales[1], v_scales[1] = 7.0 + layer, 8.0 + layer
    found = torch.frombuffer(bytearray(cache.export(0, 1)), dtype=torch.uint8)
    scales = found[2 * 3 * 16 * 6 :][: 2 * 3 * 16 * 4].view(torch.float32).view(2, 48)
    assert (scales[0] == 7.0).all() and (scales[1] == 8.0).all()
    assert (found[-2 * 16 * 4 :].view(torch.float32) == 9.0).all()


def test_blocks_that_are_filled_have_scales_of_nan():
    cache = KVCache((PagedKV(3, 6),), [3], 16, torch.int8)
    cache.fill_(torch.nan)
    assert all(scales.isnan().all() for scales in cache.scales(0) or [torch.zeros(1)])


def test_the_order_is_that_of_its_name():
    cache = KVCache((SPEC[0], SPEC[0]), [3], 16, torch.float32)
    rows = torch.randn(16, 3, 6)
    cache.store(1, torch.arange(16) + 16, rows, -rows)
    found = torch.frombuffer(bytearray(cache.export(0, 1)), dtype=torch.float32).view(2, 2, 3, 16, 6)
    assert cache.order(0) == "layer,key/value,head,token,dim"
    assert torch.equal(found[1, 0], rows.transpose(0, 1)) and torch.equal(found[1, 1], -rows.transpose(0, 1))
