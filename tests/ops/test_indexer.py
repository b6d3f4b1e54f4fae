"""Sparse attention by an indexer: the selection against a plain one in float64, attention to it against a softmax over
the selected positions, the same bits however a sequence is cut, and the bits of whole attention while all are
selected."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvasir.caches import IndexKeys, Latent
from kvasir.layers.kv_cache import KVCache
from kvasir.ops.attention import paged_attention
from kvasir.ops.indexer import select_tokens, selected_attention
from tests.layers.parts import Part, batch_of

HEADS, DIM, INDEX_HEADS, INDEX_DIM, LENGTH, SIZE, TOP_K = 4, 24, 3, 16, 75, 16, 20
SPEC = (Latent(DIM, 16), IndexKeys(INDEX_DIM))


def rows(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(LENGTH, *shape, generator=torch.Generator().manual_seed(seed))


QUERIES, LATENTS = rows(HEADS, DIM, seed=1), rows(1, DIM, seed=2)
INDEX_QUERIES, INDEX_KEYS, WEIGHTS = rows(INDEX_HEADS, INDEX_DIM, seed=3), rows(INDEX_DIM, seed=4), rows(3, seed=5)


def run(chunks: list[int], top_k: int = TOP_K, whole: bool = False, keys: torch.Tensor = INDEX_KEYS):
    """The selections and results of all rows."""
    cache, start, found = KVCache(SPEC, [12], SIZE, torch.float32), 0, []
    cache.fill_(torch.nan)
    for count in chunks:
        batch = batch_of([Part([0] * count, start, (np.array([3, 9, 1, 7, 4], np.int32),))], cache)
        part, size = slice(start, start + count), len(batch.tokens_T)

        def padded(x: torch.Tensor, part: slice = part, size: int = size) -> torch.Tensor:
            return torch.cat([x[part], x.new_zeros(size - len(x[part]), *x.shape[1:])])

        latent = padded(LATENTS)
        batch.store(0, latent, latent)
        selected = select_tokens(
            padded(INDEX_QUERIES), padded(WEIGHTS), padded(keys), cache.index_keys(1), batch.walked(1), 0.25, top_k
        )
        k, v, plan = cache.k(0), cache.v(0), batch.attention(0, HEADS)
        if whole:
            mixed = paged_attention(padded(QUERIES), k, v, plan, 0.3, value_dim=16)
        else:
            mixed = selected_attention(padded(QUERIES), selected, k, v, plan, batch.walked(0), 0.3, 16)
        found.append((selected[:count], mixed[:count]))
        start += count
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def test_the_greatest_scores_are_selected():
    scores = torch.relu(torch.einsum("qhd,kd->qhk", INDEX_QUERIES.double(), INDEX_KEYS.double()) * 0.25)
    scores = torch.einsum("qh,qhk->qk", WEIGHTS.double(), scores)
    selected, mixed = run([LENGTH])
    for row in range(LENGTH):
        best = np.lexsort((np.arange(row + 1), -scores[row, : row + 1].numpy()))[:TOP_K]
        assert selected[row].tolist() == [*sorted(best.tolist()), *[-1] * (TOP_K - len(best))]
        keys = LATENTS[np.sort(best), 0].double()
        weights = torch.softmax(QUERIES[row].double() @ keys.T * 0.3, -1)
        torch.testing.assert_close(mixed[row].double(), weights @ keys[:, :16], rtol=1e-5, atol=1e-5)


def test_of_equal_scores_the_earlier_tokens_are_selected():
    selected, _ = run([LENGTH], keys=torch.zeros_like(INDEX_KEYS))
    assert selected[-1].tolist() == [*range(TOP_K)]


@pytest.mark.parametrize("chunks", [[1] * LENGTH, [16, 16, 43], [15, 1, 1, 58], [3, 72]])
def test_chunks_give_the_same_bits_as_one_pass(chunks):
    for found, expected in zip(run(chunks), run([LENGTH]), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("top_k", [LENGTH, LENGTH + 5])
def test_a_selection_of_all_has_the_bits_of_whole_attention(top_k):
    assert torch.equal(run([LENGTH], top_k)[1], run([LENGTH], whole=True)[1])
    assert torch.equal(run([LENGTH])[1][:TOP_K], run([LENGTH], whole=True)[1][:TOP_K])
