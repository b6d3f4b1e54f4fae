"""The memory of any mix of cache kinds, of one model or of several in one pool: the bytes that are counted are those
that are there, layers do not touch each other, and blocks go out and come back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvasir.caches import Cross, Latent, PagedKV, Shared, State, Window
from kvasir.layers.kv_cache import KVCache
from kvasir.layers.kv_layout import KVLayout
from tests.examples import examples
from tests.kv.chunked import Chunked

heads, dims = st.integers(1, 3), st.integers(1, 9)
KINDS = st.one_of(
    st.builds(PagedKV, heads, dims),
    st.builds(PagedKV, heads, dims, dims),
    st.builds(Window, heads, dims, window=st.sampled_from([1, 2, 20])),
    st.integers(1, 9).flatmap(lambda wide: st.builds(Latent, st.just(wide), st.integers(0, wide))),
    st.builds(State, st.tuples(dims, dims), st.integers(1, 5), st.integers(0, 3), st.booleans()),
    st.builds(Cross, heads, dims, dims, length=st.sampled_from([5, 40])),
    st.builds(Chunked, heads, dims, chunk=st.just(8)),
)


@st.composite
def layouts(draw) -> KVLayout:
    """Up to three models; layers share layers of their own model or of an earlier one."""
    specs: dict[str, list] = {}
    for name in ("", "draft", "other")[: draw(st.integers(1, 3))]:
        spec: list = [draw(KINDS)]
        for _ in range(draw(st.integers(0, 4))):
            there = [(model, i) for model, own in {**specs, name: spec}.items() for i, kind in enumerate(own)
                     if not isinstance(kind, Shared)]  # fmt: skip
            model, layer = draw(st.sampled_from(there))
            spec.append(draw(KINDS | st.just(Shared(layer, model if model != name else None))))
        specs[name] = spec
    return KVLayout(specs)


def memory(layout: KVLayout, size: int, dtype: torch.dtype, blocks: int = 5, rows: int = 2) -> KVCache:
    cache = KVCache(layout, [blocks + g for g in range(len(layout.groups))], size, dtype, rows=rows)
    for tensor in cache.tensors:
        tensor.view(torch.uint8).random_(0, 255)  # NaN of all kinds among them
    return cache


DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@examples(60)
@given(layouts(), st.sampled_from([4, 16]), DTYPES)
def test_counted_bytes_equal_allocated_bytes(layout, size, dtype):
    cache = memory(layout, size, dtype)
    counted = sum(group.bytes_per_block * n for group, n in zip(cache.groups, cache.num_blocks, strict=True))
    assert sum(tensor.nbytes for tensor in cache.tensors) == counted
    owned = [layer for layer, owner in enumerate(layout.owners) if layer == owner]
    states = [cache.row_state(layer) for layer in owned if layout.kinds[layer].row_shape]
    assert sum(rows.nbytes for rows in states) == 2 * layout.row_bytes
    assert sorted(layer for group in layout.groups for layer in group) == owned
    assert all(cache.groups[g].bytes_per_block == cache.export(g, 1).nbytes for g in range(len(cache.groups)))


@examples(60)
@given(layouts(), st.sampled_from([4, 16]), DTYPES)
def test_layers_own_their_memory_or_share_another_layers(layout, size, dtype):
    """Values written through one model's view are read by the layers that share them and by no others."""
    cache = memory(layout, size, dtype)
    cache.fill_(0.0)
    views = {layer: (cache.of(name), i) for name, own in layout.models.items() for i, layer in enumerate(own)}
    for layer, (view, i) in views.items():
        assert view.owns(i) == (layout.owners[layer] == layer)
        if view.owns(i):
            for array in view.arrays(i):
                assert not array.any(), "another layer wrote here"
                array[:, 2] = layer + 1
    for layer, (view, i) in views.items():
        assert view.spec[i] == layout.kinds[layout.owners[layer]]
        assert view.group_of(i) == cache.group_of(layout.owners[layer])
        for array in view.arrays(i):
            assert (array[:, 2] == layout.owners[layer] + 1).all() and not array[:, :2].any()


@examples(60)
@given(layouts(), st.sampled_from([4, 16]), DTYPES)
def test_a_block_goes_out_and_comes_back(layout, size, dtype):
    cache, other = memory(layout, size, dtype), memory(layout, size, dtype)
    for group in range(len(cache.groups)):
        data = cache.export(group, 2)
        before = [tensor.clone() for _, own in other.of_group(group) for tensor in own]
        other.import_(group, 4, data)
        other.copy(group, [(4, 1)])
        assert bytes(other.export(group, 4)) == bytes(other.export(group, 1)) == bytes(data)
        after = [tensor for _, own in other.of_group(group) for tensor in own]
        sources = [tensor for _, own in cache.of_group(group) for tensor in own]
        for was, now, source in zip(before, after, sources, strict=True):
            assert torch.equal(now[:, :, 4].contiguous().view(torch.uint8), raw(source[:, :, 2]))
            assert torch.equal(raw(now[:, :, [0, 2, 3]]), raw(was[:, :, [0, 2, 3]])), "another block was written"


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_keys_wider_than_values_and_values_that_are_keys():
    cache = KVCache((PagedKV(2, 12, 8), Latent(12, 8)), [4], 16, torch.float32)
    cache.fill_(0.0)
    k, v, slots = torch.randn(3, 2, 12), torch.randn(3, 2, 8), torch.tensor([17, 18, 40])
    cache.store(0, slots, k, v)
    cache.store(1, slots, k[:, :1], k[:, :1, :8])
    assert cache.k(0).shape == (4, 16, 2, 12) and cache.v(0).shape == (4, 16, 2, 8)
    assert torch.equal(cache.k(0)[1, 1], k[0]) and torch.equal(cache.v(0)[2, 8], v[2])
    assert torch.equal(cache.k(1)[1, 2, 0], k[1, 0]) and torch.equal(cache.v(1)[1, 2, 0], k[1, 0, :8])
    assert cache.groups[0].bytes_per_block == 16 * 4 * (2 * (12 + 8) + 12), "a latent row is stored once"
    assert cache.order(0) == "layer,key,head,token,dim+layer,value,head,token,dim+layer,row,head,token,dim"


def test_a_layer_that_shares_only_reads():
    cache = KVCache((PagedKV(1, 4), Shared(0)), [3], 16, torch.float32)
    assert cache.k(1).data_ptr() == cache.k(0).data_ptr()
    with pytest.raises(AssertionError, match="another"):
        cache.store(1, torch.tensor([16]), torch.ones(1, 1, 4), torch.ones(1, 1, 4))


@pytest.mark.parametrize(
    ("specs", "match"),
    [
        ({"": (PagedKV(), Shared(2))}, "layer 1 of .*'' .*layer 2 of ''"),
        ({"": (PagedKV(),), "draft": (Shared(0, "target"),)}, "layer 0 of 'target'"),
        ({"": (PagedKV(), Shared(0), Shared(1))}, "layer 2 of .*layer 1 of .*no cache"),
        ({"": (Shared(0),)}, "layer 0 of .*layer 0 of .*no cache"),
    ],
)
def test_sharing_an_absent_cache_is_refused(specs, match):
    with pytest.raises(ValueError, match=match):
        KVLayout(specs)


def test_a_running_state_for_each_row():
    """It costs what it says, and is the state that the walk from the block's start gives, bit by bit."""
    kind, cells = State((3, 2), inputs=2, before=0, running=True), torch.randn(40, 2)
    cache = KVCache((kind, kind), [4], 16, torch.float32, rows=5)
    assert cache.row_state(1).shape == (5, 3, 2) and cache.layout.row_bytes == 2 * 4 * 6
    step = lambda state, x: torch.sin(state * x[0]) + x[1]  # noqa: E731
    cache.row_state(1)[3] = 0.0
    for p, x in enumerate(cells):
        if p % 16 == 0:
            cache.state(1)[1 + p // 16] = cache.row_state(1)[3]
        cache.inputs(1)[1 + p // 16, p % 16] = x
        cache.row_state(1)[3] = step(cache.row_state(1)[3], x)
    walked = cache.state(1)[3].clone()
    for x in cache.inputs(1)[3, :8]:
        walked = step(walked, x)
    assert torch.equal(walked, cache.row_state(1)[3])
