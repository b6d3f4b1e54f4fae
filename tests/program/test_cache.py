"""Blocks of the native cache as bytes: what goes out comes back, in an order that knows no tiles."""

from __future__ import annotations

import numpy as np
import pytest

from kvasir.caches import PagedKV, Window
from kvasir.layers.kv_cache import KVCache
from kvasir.ops import native
from kvasir.ops.attention.native import Layout, store_kv
from kvasir.program.cache import NativeCache

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not native.available(), reason=native.reason())

FORMATS = ["float32", "bfloat16", "float16", "int8"]
DIMS = [16, 64, 6, 18, 20]


def native_cache(kv_dtype: str, dim: int, block_size: int = 32) -> NativeCache:
    spec = [PagedKV(3, dim), Window(2, dim, window=40), PagedKV(3, dim)]
    return NativeCache(spec, [5, 4], block_size, kv_dtype)


def store(cache: NativeCache, block: int, seed: int) -> list:
    """Fills a block of each layer through the kernels' own store; the rows [2, tokens, heads, dim] of each layer."""
    rng, rows = torch.Generator().manual_seed(seed), []
    for layer, spec in enumerate(cache.spec):
        group = cache.group_of(layer)
        kv = torch.randn((2, cache.block_size, spec.heads, spec.key_dim), generator=rng)
        slots = torch.arange(cache.block_size) + block * cache.block_size
        index = cache.groups[group].layers.index(layer)
        layout = Layout(cache.kv_dtype, spec.heads, spec.key_dim, cache.block_size)
        store_kv(layout, torch.from_numpy(cache.tensors[group][index]).view(torch.uint8), kv[0], kv[1], slots)
        rows.append(kv)
    return rows


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_a_block_goes_out_and_comes_back(kv_dtype, dim):
    """Into another block of another cache, whose padding holds something else."""
    cache, other = native_cache(kv_dtype, dim), native_cache(kv_dtype, dim)
    cache.fill_(float("nan"))
    store(cache, 2, seed=1)
    for array in other.tensors:
        array.view(np.uint8)[...] = np.random.default_rng(0).integers(0, 255, array.view(np.uint8).shape)
    for group in range(2):
        before = other.tensors[group].copy()
        data = cache.export(group, 2)
        other.import_(group, 3, data)
        assert bytes(other.export(group, 3)) == bytes(data)
        assert data.readonly
        changed = (other.tensors[group].view(np.uint8) != before.view(np.uint8)).any((0, 1, 3))
        assert np.flatnonzero(changed).tolist() == [3], "another block was written"
        if dim % 16 == 0:
            there, here = other.tensors[group][:, :, 3], cache.tensors[group][:, :, 2]
            assert np.array_equal(there.view(np.uint8), here.view(np.uint8))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kv_dtype", FORMATS[:3])
def test_the_bytes_are_those_of_the_plain_cache(kv_dtype, dim):
    """Both executors' caches of the same numbers export the same: [layers, 2, heads, tokens, dim]."""
    cache = native_cache(kv_dtype, dim)
    rows = store(cache, 2, seed=2)
    plain = KVCache(cache.spec, [5, 4], cache.block_size, getattr(torch, kv_dtype))
    for layer, kv in enumerate(rows):
        slots = torch.arange(cache.block_size) + 4 * cache.block_size
        group = plain.group_of(layer)
        slots = slots if group == 0 else slots - 2 * cache.block_size
        plain.store(layer, slots, kv[0].to(plain.dtype), kv[1].to(plain.dtype))
    for group, block in enumerate((4, 2)):
        assert cache.order(group) == plain.order(group)
        assert bytes(cache.export(group, 2)) == bytes(plain.export(group, block))
        plain.import_(group, 1, cache.export(group, 2))
        assert bytes(plain.export(group, 1)) == bytes(plain.export(group, block))


@pytest.mark.parametrize("dim", DIMS)
def test_int8_keeps_numbers_and_scales_of_each_token(dim):
    cache = native_cache("int8", dim)
    rows = store(cache, 1, seed=3)
    raw = np.frombuffer(cache.export(0, 1), np.uint8).reshape(2, 2, 3, cache.block_size, dim + 4)
    numbers = raw[..., :dim].view(np.int8).astype(np.float32)
    scales = raw[..., dim:].copy().view(np.float32)
    for i, layer in enumerate((0, 2)):
        exact = rows[layer].permute(0, 2, 1, 3).numpy()
        assert np.abs(numbers[i] * scales[i] - exact).max() <= 0.51 * scales.max()
