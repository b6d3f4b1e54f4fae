"""Self-attention over the paged cache, as a layer."""

from __future__ import annotations

from torch import Tensor

from kvasir.layers.batch import Batch
from kvasir.layers.linear import QKV, Out
from kvasir.layers.module import Module
from kvasir.layers.norm import RMSNorm
from kvasir.layers.rope import Rope
from kvasir.ops.attention import paged_attention


class Attention(Module):
    """x: float32 [T, D] -> [T, D]. Writes its keys and values into the cache, then reads them from there.

    layer: its number, by which the cache knows it. head_norm_eps: None, or q and k are normalised per head
    before they are turned. scale: of the scores, head_dim^-0.5 if not given.
    """

    def __init__(
        self,
        layer: int,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        rope: Rope | None = None,
        bias: bool = False,
        out_bias: bool = False,
        head_norm_eps: float | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
    ):
        self.layer, self.heads, self.kv_heads, self.head_dim = layer, heads, kv_heads, head_dim
        self.rope = rope
        self.scale = head_dim**-0.5 if scale is None else scale
        self.softcap = softcap
        self.qkv = QKV(width, heads * head_dim, kv_heads * head_dim, bias)
        self.q_norm = None if head_norm_eps is None else RMSNorm(head_dim, head_norm_eps)
        self.k_norm = None if head_norm_eps is None else RMSNorm(head_dim, head_norm_eps)
        self.out = Out(heads * head_dim, width, out_bias)

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.qkv(x_TD, batch)
        q_THd = q.view(-1, self.heads, self.head_dim)
        k_TKd = k.view(-1, self.kv_heads, self.head_dim)
        v_TKd = v.view(-1, self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q_THd, k_TKd = self.q_norm(q_THd), self.k_norm(k_TKd)
        if self.rope is not None:
            angles = batch.angles(self.rope)
            q_THd, k_TKd = self.rope(q_THd, angles), self.rope(k_TKd, angles)
        batch.store(self.layer, k_TKd, v_TKd)
        mixed_THd = paged_attention(
            q_THd,
            batch.kv.k(self.layer),
            batch.kv.v(self.layer),
            batch.attention(self.layer, self.heads // self.kv_heads),
            self.scale,
            self.softcap,
        )
        return self.out(mixed_THd.flatten(1), batch)
