"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), in its absorbed form.

    c = norm(W_c x)      r = rope(W_r x)                    the token's row in the cache: [c, r], read by all heads
    k_h = [K_h c, r]     v_h = V_h c                        what a head attends to, never computed:
    q_h k_h = [K_h^T q_h, q_h'] [c, r]                      the query goes through K_h instead of all keys
    sum of w v_h = V_h (sum of w c)                         and the output through V_h instead of all values

So keys have rank + rope dimensions, values are the first `rank` of them, and there is one KV head. Prefill and decode
compute the same (docs/exactness.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvasir.caches import CacheKind, Latent
from kvasir.layers.linear import HeadLinear, Linear, Out, Plain
from kvasir.layers.module import Module
from kvasir.layers.norm import RMSNorm
from kvasir.layers.rope import Rope
from kvasir.ops.attention import paged_attention
from kvasir.ops.heads import join_heads

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch


class LatentAttention(Module):
    """x: float32 [T, D] -> [T, D]. Writes the step's latent rows into the cache, then attends over the cache.

    layer: its number, which identifies it in the cache. plain, turning: dimensions of a head's query without and with
    the rotary embedding. rank: of the latent row's part that the rotary embedding leaves alone. value_dim: of a head.
    q_rank: of the queries' low-rank projection, 0 for none. rope: None for none: the dimensions exist, but do not turn.
    query_rope: of the queries, `rope` by default; query_growth: of their other dimensions. scale: of the scores. bias:
    whether the first projections and the last one have biases. Ranks hold the whole layer.
    """

    def __init__(
        self,
        layer: int,
        width: int,
        heads: int,
        *,
        plain: int,
        turning: int,
        rank: int,
        value_dim: int,
        scale: float,
        eps: float,
        q_rank: int = 0,
        rope: Rope | None = None,
        query_rope: Rope | None = None,
        query_growth: Rope | None = None,
        bias: bool = False,
    ):
        self.layer, self.heads, self.scale = layer, heads, scale
        self.model_layer = layer  # as in Attention
        self.plain, self.turning, self.rank = plain, turning, rank
        self.rope, self.query_rope, self.query_growth = rope, query_rope or rope, query_growth
        self.q_down = Plain(width, q_rank, bias) if q_rank else None
        self.q_norm = RMSNorm(q_rank, eps) if q_rank else None
        self.q = Linear(q_rank or width, {"plain": heads * plain, "turning": heads * turning})
        self.kv_down = Linear(width, {"latent": rank, "turning": turning}, bias)
        self.kv_norm = RMSNorm(rank, eps)
        self.key_up = HeadLinear(heads, plain, rank)
        self.value_up = HeadLinear(heads, rank, value_dim)
        self.out = Out(heads * value_dim, width, bias)

    def cache(self, window: int = 0) -> CacheKind:
        """window: 0, all keys."""
        assert not window, "latent attention has no window"
        return Latent(self.rank + self.turning, self.rank)

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        latent_TR = x_TD
        if self.q_down is not None and self.q_norm is not None:
            latent_TR = self.q_norm(self.q_down(x_TD, batch))
        q_THd, k_T1d = self._queries(latent_TR, batch), self._rows(x_TD, batch)
        batch.store(self.layer, k_T1d, k_T1d)
        mixed_THr = self._attend(q_THd, x_TD, latent_TR, batch)
        return self.out(self.value_up(mixed_THr).flatten(1), batch)

    def _attend(self, q_THd: Tensor, x_TD: Tensor, latent_TR: Tensor, batch: Batch) -> Tensor:
        """The weighted latents [T, H, rank]. latent: from which the queries came."""
        batch.note_weights(self.model_layer, self.layer, q_THd, None, self.scale, 0.0, None)
        return paged_attention(
            q_THd,
            batch.kv.k(self.layer),
            batch.kv.v(self.layer),
            batch.attention(self.layer, self.heads),
            self.scale,
            value_dim=self.rank,
        )

    def _queries(self, latent_TR: Tensor, batch: Batch) -> Tensor:
        plain_THd = self.q.apply("plain", latent_TR, batch).view(-1, self.heads, self.plain)
        turning_THd = self.q.apply("turning", latent_TR, batch).view(-1, self.heads, self.turning)
        if self.query_growth is not None:
            plain_THd = self.query_growth(plain_THd, batch.angles(self.query_growth))
        if self.query_rope is not None:
            turning_THd = self.query_rope(turning_THd, batch.angles(self.query_rope))
        return join_heads(self.key_up(plain_THd), turning_THd)

    def _rows(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """The latent rows [T, 1, rank + turning]."""
        latent_TR = self.kv_norm(self.kv_down.apply("latent", x_TD, batch))
        turning_T1d = self.kv_down.apply("turning", x_TD, batch).view(-1, 1, self.turning)
        if self.rope is not None:
            turning_T1d = self.rope(turning_T1d, batch.angles(self.rope))
        return join_heads(latent_TR.view(-1, 1, self.rank), turning_T1d)
