"""Blocks of the native cache as bytes: what goes out comes back, in an order that knows no tiles."""

from __future__ import annotations

import numpy as np
import pytest

from kvasir.caches import Latent, PagedKV, Window
from kvasir.layers.kv_cache import KVCache
from kvasir.ops import native
from kvasir.ops.attention.native import Layout, attention, store_kv
from kvasir.plan import Work
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


# Keys of another width than values; latent rows, of which the values are the beginning.
UNEVEN = {"uneven": [PagedKV(2, 24, 18), PagedKV(2, 24, 18)], "latent": [Latent(40, 22), Latent(40, 22)]}


def store_rows(cache: NativeCache, block: int, seed: int) -> list:
    """Fills a block of each layer: the rows of keys and values of each layer, [tokens, heads, dim]."""
    rng, rows = torch.Generator().manual_seed(seed), []
    slots = torch.arange(cache.block_size) + block * cache.block_size
    for layer, kind in enumerate(cache.spec):
        latent = isinstance(kind, Latent)
        k, v = (torch.randn(cache.block_size, kind.heads, dim, generator=rng) for dim in (kind.key_dim, kind.value_dim))
        layout = Layout(cache.kv_dtype, kind.heads, kind.key_dim, cache.block_size, kind.value_dim, latent)
        arrays = [torch.from_numpy(array[0]).view(torch.uint8) for array in cache.arrays(layer)]
        store_kv(layout, arrays, k, k if latent else v, slots)
        rows.append((k, v))
    return rows


@pytest.mark.parametrize("most", [1, 2, 3, 8])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["several", "uneven", "latent"])
def test_ranges_of_layers_are_the_bytes_of_a_block(name, kv_dtype, most):
    """They lie where they say, without a gap; there may be several banks in a group."""
    spec = [PagedKV(3, 16), PagedKV(2, 32), *[PagedKV(3, 16)] * 6] if name == "several" else UNEVEN[name] * 3
    cache = NativeCache(spec, [5], 32, kv_dtype)
    for array in cache.tensors:
        raw = array.view(np.uint8)
        raw[...] = np.random.default_rng(0).integers(0, 256, raw.shape, np.uint8)
    data, found = bytearray(len(cache.export(0, 2))), list(cache.layer_ranges(0, most))
    at = 0
    for layers in found:
        piece = cache.export_range(2, layers)
        assert (layers.offset, layers.num_bytes) == (at, len(piece))
        data[at : at + len(piece)] = piece
        at += len(piece)
    assert data == cache.export(0, 2)
    assert all(sum(1 for f in found if (f.bank, f.part) == one[:2]) <= most for one in found)


@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_uneven_blocks_go_out_and_come_back(kv_dtype, name):
    """Into another block, whose values follow from the keys where rows are latent."""
    cache, other = (NativeCache(UNEVEN[name], [5], 32, kv_dtype) for _ in range(2))
    cache.fill_(float("nan"))
    other.fill_(float("nan"))
    rows = store_rows(cache, 2, seed=4)
    data = cache.export(0, 2)
    other.import_(0, 3, data)
    assert bytes(other.export(0, 3)) == bytes(data)
    numbers = 40 if name == "latent" else 2 * (24 + 18)
    scales = 4 * (1 if name == "latent" else 4) if kv_dtype == "int8" else 0
    item = {"float32": 4, "int8": 1}.get(kv_dtype, 2)
    assert len(data) == 2 * 32 * (numbers * item + scales)
    layout = Layout(kv_dtype, cache.spec[0].heads, cache.spec[0].key_dim, 32, cache.spec[0].value_dim, name == "latent")
    q, tables = torch.randn(1, 4, cache.spec[0].key_dim), [np.array([2], np.int32), np.array([3], np.int32)]
    found = []
    for at, source in enumerate((cache, other)):
        arrays = [torch.from_numpy(array[0]).view(torch.uint8) for array in source.arrays(1)]
        found.append(attention(layout, arrays, q, [Work(at, 31, 1)], [0], tables, 0.2))
    assert np.array_equal(*found)
    keys, values = rows[1][0][:, [0, 0, -1, -1]], (rows[1][1] if name != "latent" else rows[1][0][..., :22])
    weights = torch.softmax(torch.einsum("qhd,thd->qht", q, keys) * 0.2, -1)
    expected = torch.einsum("qht,thd->qhd", weights, values[:, [0, 0, -1, -1]])
    assert np.abs(found[0] - expected.numpy()).max() < {"float32": 1e-5, "int8": 0.08}.get(kv_dtype, 0.03)


@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.parametrize("kv_dtype", FORMATS[:3])
def test_uneven_bytes_are_those_of_the_plain_cache(kv_dtype, name):
    cache = NativeCache(UNEVEN[name], [5], 32, kv_dtype)
    plain = KVCache(cache.spec, [5], cache.block_size, getattr(torch, kv_dtype))
    for layer, (k, v) in enumerate(store_rows(cache, 2, seed=5)):
        plain.store(layer, torch.arange(32) + 4 * 32, k.to(plain.dtype), v.to(plain.dtype))
    assert cache.order(0) == plain.order(0)
    assert bytes(cache.export(0, 2)) == bytes(plain.export(0, 4))
