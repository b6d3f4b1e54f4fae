"""Latent attention to the tokens that an indexer selects (DeepSeek-V3.2, arXiv:2512.02556).

    score of token s for token t = sum over heads of w_t relu(q_t k_s / sqrt(d))        in float32

q comes from the latent of the attention's queries, k and w from x. Each token keeps its k in a cache of its own beside
the latent row, so whatever keeps the one keeps the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvasir.caches import CacheKind, IndexKeys
from kvasir.layers.latent_attention import LatentAttention
from kvasir.layers.linear import Plain
from kvasir.layers.module import Module
from kvasir.layers.norm import LayerNorm
from kvasir.layers.rope import Rope
from kvasir.ops.indexer import select_tokens, selected_attention

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch

_NORM_EPS = 1e-6  # of the keys' norm, in every model


@dataclass(frozen=True, slots=True)
class IndexerSizes:
    """heads, dim: of an indexer's queries. top_k: how many tokens it selects."""

    heads: int
    dim: int
    top_k: int


class Indexer(Module):
    """Selects tokens: x float32 [T, D], latents of queries float32 [T, q_rank] -> positions int32 [T, top_k].

    layer: its number in the cache. rope: of the first dimensions of queries and keys.
    """

    def __init__(self, layer: int, width: int, q_rank: int, sizes: IndexerSizes, rope: Rope):
        self.layer, self.sizes, self.rope = layer, sizes, rope
        self.q = Plain(q_rank, sizes.heads * sizes.dim)
        self.k = Plain(width, sizes.dim)
        self.k_norm = LayerNorm(sizes.dim, _NORM_EPS)
        self.weights = Plain(width, sizes.heads)

    def cache(self) -> CacheKind:
        """The kind of the cache of its keys."""
        return IndexKeys(self.sizes.dim)

    def __call__(self, x_TD: Tensor, latent_TR: Tensor, batch: Batch) -> Tensor:
        heads, dim, angles = self.sizes.heads, self.sizes.dim, batch.angles(self.rope)
        q_THd = self.rope(self.q(latent_TR, batch).view(-1, heads, dim), angles)
        k_T1d = self.rope(self.k_norm(self.k(x_TD, batch)).view(-1, 1, dim), angles)
        weights_TH = self.weights(x_TD, batch) * (1 / math.sqrt(heads))
        cache, plan = batch.kv.index_keys(self.layer), batch.walked(self.layer)
        return select_tokens(q_THd, weights_TH, k_T1d.flatten(1), cache, plan, 1 / math.sqrt(dim), self.sizes.top_k)


class SparseLatentAttention(LatentAttention):
    """Latent attention to selected tokens. sizes: of its indexer. selects: whether it has one, else it reads the
    selection of the last layer that has. Other arguments as in `LatentAttention`; layer + 1 is its indexer's number in
    the cache."""

    def __init__(self, layer: int, width: int, heads: int, *, sizes: IndexerSizes, selects: bool, **options: Any):
        super().__init__(layer, width, heads, **options)
        assert self.rope is not None and self.q_down is not None, "an indexer reads the latent of the queries"
        self.indexer = Indexer(layer + 1, width, self.q_down.outputs["weight"], sizes, self.rope) if selects else None

    def _attend(self, q_THd: Tensor, x_TD: Tensor, latent_TR: Tensor, batch: Batch) -> Tensor:
        if self.indexer is not None:
            batch.select(self.indexer(x_TD, latent_TR, batch))
        selected_TS, rows = batch.selected(), batch.walked(self.layer)
        batch.note_selected_weights(self.model_layer, self.layer, q_THd, selected_TS, self.scale)
        return selected_attention(
            q_THd,
            selected_TS,
            batch.kv.k(self.layer),
            batch.kv.v(self.layer),
            batch.attention(self.layer, self.heads),
            rows,
            self.scale,
            self.rank,
        )
