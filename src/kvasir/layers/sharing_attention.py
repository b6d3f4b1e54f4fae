"""Attention of Gemma 3n and 4: layers may read the keys and values of another layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvasir.caches import CacheKind, Shared
from kvasir.layers.attention import Attention
from kvasir.layers.linear import QKV
from kvasir.layers.module import Segments
from kvasir.ops.attention import paged_attention
from kvasir.ops.norm import rms_norm
from kvasir.parallel import Mesh

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch


class SharingAttention(Attention):
    """Attention whose heads of q, k and v are normalised, v without weights; scores are not scaled.

    owner: the layer whose keys and values it reads, which computes none of its own; None if it computes them.
    keys_as_values: whether the values are the projected keys, normalised as values. whole: whether every rank holds all
    heads, as it must where layers share keys and values: the ranks' parts of two layers may differ.
    """

    def __init__(
        self,
        layer: int,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        eps: float,
        owner: int | None = None,
        keys_as_values: bool = False,
        whole: bool = False,
        **options: Any,
    ):
        super().__init__(layer, width, heads, kv_heads, head_dim, head_norm_eps=eps, scale=1.0, **options)
        self.eps, self.owner, self.whole = eps, owner, whole
        parts = "q" if owner is not None else "qk" if keys_as_values else "qkv"
        self.qkv = QKV(width, heads * head_dim, kv_heads * head_dim, options.get("bias", False), parts)
        if owner is not None:
            self.k_norm = None

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        q, *kv = (self.qkv.apply(part, x_TD, batch) for part in self.qkv.outputs)
        assert self.q_norm is not None and self.rope is not None
        q_THd = self.rope(self.q_norm(q.view(-1, self.heads, self.head_dim)), batch.angles(self.rope))
        if kv:
            self._store(kv[0], kv[-1], batch)
        batch.note_weights(self.model_layer, self.layer, q_THd, None, self.scale, self.softcap, None)
        keys, values = batch.kv.k(self.layer), batch.kv.v(self.layer)
        plan = batch.attention(self.layer, self.heads // self.kv_heads)
        mixed_THd = paged_attention(q_THd, keys, values, plan, self.scale, self.softcap, None)
        return self.out(mixed_THd.flatten(1), batch)

    def _store(self, k: Tensor, v: Tensor, batch: Batch) -> None:
        """k, v: float32 [T, K * d]"""
        assert self.k_norm is not None and self.rope is not None
        k_TKd = self.k_norm(k.view(-1, self.kv_heads, self.head_dim))
        v_TKd = rms_norm(v.view(-1, self.kv_heads, self.head_dim), None, self.eps)
        batch.store(self.layer, self.rope(k_TKd, batch.angles(self.rope)), v_TKd)

    def cache(self, window: int = 0) -> CacheKind | Shared:  # type: ignore[override]
        """window: maximum keys that a row attends to, 0 for all."""
        return super().cache(window) if self.owner is None else Shared(self.owner)

    def split(self, mesh: Mesh, segments: Segments) -> None:
        """As `Attention.split`, unless every rank holds the whole layer."""
        if not self.whole:
            super().split(mesh, segments)
