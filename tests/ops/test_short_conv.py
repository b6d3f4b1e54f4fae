"""The gated short convolution: against torch's own, and the same bits however a sequence is cut and whatever lies
beside."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kvasir.caches import State
from kvasir.layers.kv_cache import KVCache
from kvasir.ops.short_conv import short_conv
from tests.layers.parts import Part, batch_of

WIDTH, TAPS, SIZE, LENGTH = 37, 4, 16, 75
SPEC = State((0,), WIDTH, TAPS - 1)
KERNEL, BIAS = (torch.randn(shape, generator=torch.Generator().manual_seed(7)) for shape in ((WIDTH, TAPS), (WIDTH,)))


def inputs(seed: int, count: int = LENGTH) -> torch.Tensor:
    """b, c and x, float32 [3, count, WIDTH]."""
    return torch.randn(3, count, WIDTH, generator=torch.Generator().manual_seed(seed))


def new_cache(blocks: int = 16, size: int = SIZE) -> KVCache:
    cache = KVCache((SPEC,), [blocks], size, torch.bfloat16)
    cache.fill_(torch.nan)
    return cache


def table(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


def step(cache: KVCache, parts, bias: torch.Tensor | None = BIAS) -> list[torch.Tensor]:
    """parts: (b, c and x, start, block table) of each sequence."""
    batch = batch_of([Part([0] * x.shape[1], start, (blocks,)) for x, start, blocks in parts], cache)
    bcx = torch.full((3, len(batch.tokens_T), WIDTH), torch.nan)  # the rows that fill up are anything
    bcx[:, : batch.num_tokens] = torch.cat([x for x, *_ in parts], 1)
    b_TD, c_TD, x_TD = bcx
    out = short_conv(b_TD, c_TD, x_TD, KERNEL, bias, cache.inputs(0), batch.states(0))
    return [out[a:b] for a, b in zip(batch.starts[:-1], batch.starts[1:], strict=True)]


def whole(x: torch.Tensor, size: int = SIZE, **how) -> torch.Tensor:
    blocks = -(-x.shape[1] // size)
    return step(new_cache(blocks + 1, size), [(x, 0, table(*range(1, blocks + 1)))], **how)[0]


@pytest.mark.parametrize("bias", [None, BIAS], ids=("plain", "biased"))
def test_against_torch(bias):
    b, c, x = inputs(1)
    u = F.pad((b * x).T[None], (TAPS - 1, 0))
    expected = c * F.conv1d(u, KERNEL[:, None], bias, groups=WIDTH)[0].T
    torch.testing.assert_close(whole(inputs(1), bias=bias), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunks", [[1] * LENGTH, [16, 16, 43], [15, 1, 1, 47], [17, 31, 2], [3, 70]])
def test_chunks_give_the_same_bits_as_one_pass(chunks):
    x, cache, start, rows = inputs(1), new_cache(), 0, []
    for count in [*chunks, LENGTH - sum(chunks)]:
        if count:
            rows += step(cache, [(x[:, start : start + count], start, table(3, 9, 1, 7, 4))])
            start += count
    assert torch.equal(torch.cat(rows), whole(x))


@pytest.mark.parametrize("size", [4, 8, 64, 128])
def test_block_sizes_do_not_change_the_result(size):
    assert torch.equal(whole(inputs(1), size), whole(inputs(1)))


def test_a_sequence_does_not_depend_on_others():
    sequences = [inputs(seed, count) for seed, count in ((1, 75), (5, 16), (9, 33), (13, 1))]
    tables = [table(1, 2, 3, 4, 5), table(6), table(7, 8, 9), table(10)]
    cache, done, rows = new_cache(), [0] * 4, [[] for _ in sequences]
    for counts in ([20, 0, 16, 1], [12, 7, 1, 0], [1, 8, 16, 0], [42, 1, 0, 0]):
        picked = [i for i in (2, 0, 3, 1) if counts[i]]
        parts = [(sequences[i][:, done[i] : done[i] + counts[i]], done[i], tables[i]) for i in picked]
        for i, out in zip(picked, step(cache, parts), strict=True):
            rows[i].append(out)
            done[i] += counts[i]
    for x, found in zip(sequences, rows, strict=True):
        assert torch.equal(torch.cat(found), whole(x))


@pytest.mark.parametrize("start", [31, 32, 33, 35, 47])
def test_a_prefix_is_continued_from_its_end(start):
    """By another sequence, of which only the block of the last token is there; after wrong drafts."""
    x, cache = inputs(1), new_cache()
    step(cache, [(x[:, :start], 0, table(1, 2, 3, 4, 5))])
    last = (start - 1) // SIZE
    cache.tensors[0][:, :, [b for b in range(16) if b != 1 + last]] = torch.nan
    mine = table(*[15] * last, *range(1 + last, 6))
    step(cache, [(inputs(99, LENGTH - start), start, mine)])
    assert torch.equal(step(cache, [(x[:, start:], start, mine)])[0], whole(x)[start:])
