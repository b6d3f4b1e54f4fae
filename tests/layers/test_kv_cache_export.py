"""Blocks as bytes: what goes out comes back, for every kind of cache."""

import pytest
import torch

from kvasir.caches import PagedKV, State, Window
from kvasir.layers.kv_cache import KVCache

SPEC = (PagedKV(3, 6), Window(2, 8, window=40), State((3, 5), inputs=7, before=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", range(3))
def test_a_block_goes_out_and_comes_back(dtype, group):
    cache = KVCache(SPEC, [5, 5, 5], 16, dtype)
    for tensor in cache.tensors:
        tensor.view(torch.uint8).random_(0, 255)  # NaN of all kinds among them
    before = cache.tensors[group].view(torch.uint8).clone()
    data = cache.export(group, 2)
    assert data.nbytes == cache.bytes_per_block(group) and data.readonly
    cache.import_(group, 4, data)
    after = cache.tensors[group].view(torch.uint8)
    assert torch.equal(after[:, :, 4], before[:, :, 2])
    assert torch.equal(after[:, :, :4], before[:, :, :4])


def test_the_order_is_that_of_its_name():
    cache = KVCache((SPEC[0], SPEC[0]), [3], 16, torch.float32)
    rows = torch.randn(16, 3, 6)
    cache.store(1, torch.arange(16) + 16, rows, -rows)
    found = torch.frombuffer(bytearray(cache.export(0, 1)), dtype=torch.float32).view(2, 2, 3, 16, 6)
    assert cache.order(0) == "layer,key/value,head,token,dim"
    assert torch.equal(found[1, 0], rows.transpose(0, 1)) and torch.equal(found[1, 1], -rows.transpose(0, 1))
