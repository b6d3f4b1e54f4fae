"""The attention layer: self-attention over the paged cache."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvasir.caches import CacheKind, attention
from kvasir.layers.linear import QKV, Out, Plain
from kvasir.layers.module import Module, Segments, Vector
from kvasir.layers.norm import HeadsLayerNorm, RMSNorm
from kvasir.layers.relative import Positions
from kvasir.layers.rope import Rope
from kvasir.ops.activation import clamp, scale_heads, sigmoid
from kvasir.ops.attention import paged_attention
from kvasir.parallel import Mesh

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch


class Attention(Module):
    """x: float32 [T, D] -> [T, D]. Writes the step's keys and values into the cache, then attends over the cache.

    layer: its number, which identifies it in the cache. inputs: the width of x if it is not that of the result.
    query_rope: of the queries, `rope` by default. head_norm_eps:
    if not None, q and k are normalised by a norm of the class `head_norm`: each head, or all heads together if
    `whole_norm`; before the rotary embedding, or after it if `norm_after_rope`. scale: of the scores, head_dim^-0.5 by
    default. sinks: whether each head has an additional score without a value (arXiv:2309.17453), in a vector of the
    name `sink_name`. relative: the parts of the scores by relative position. clip: the greatest magnitude of queries,
    keys and values before norms and rotation, 0 for none. value_dim: of a head's values, 0 for head_dim. value_scale:
    their factor.
    """

    def __init__(
        self,
        layer: int,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        inputs: int = 0,
        rope: Rope | None = None,
        query_rope: Rope | None = None,
        bias: bool = False,
        out_bias: bool = False,
        head_norm_eps: float | None = None,
        head_norm: type[RMSNorm] = RMSNorm,
        whole_norm: bool = False,
        norm_after_rope: bool = False,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: bool = False,
        sink_name: str = "sinks",
        relative: Positions | None = None,
        clip: float = 0.0,
        value_dim: int = 0,
        value_scale: float = 1.0,
    ):
        self.layer, self.heads, self.kv_heads, self.head_dim = layer, heads, kv_heads, head_dim
        self.model_layer = layer  # differs from `layer`, that of its cache, if some layers have none or two
        self.rope, self.query_rope = rope, query_rope or rope
        self.scale = 1 / math.sqrt(head_dim) if scale is None else scale
        self.softcap, self.clip = softcap, clip
        self.sinks = Vector(heads, sink_name) if sinks else None
        self.value_dim, self.value_scale = value_dim or head_dim, value_scale
        self.relative = relative
        self.qkv = QKV(inputs or width, heads * head_dim, kv_heads * head_dim, bias, v=kv_heads * self.value_dim)
        self.whole_norm, self.norm_after_rope = whole_norm, norm_after_rope
        self.q_norm = self.k_norm = None
        if head_norm_eps is not None:
            self.q_norm = head_norm(head_dim * (heads if whole_norm else 1), head_norm_eps)
            self.k_norm = head_norm(head_dim * (kv_heads if whole_norm else 1), head_norm_eps)
        self.out = Out(heads * self.value_dim, width, out_bias)

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.qkv(x_TD, batch)
        if self.clip:
            q, k, v = (clamp(part, -self.clip, self.clip) for part in (q, k, v))
        mixed_THd = self.mix(q.view(-1, self.heads, self.head_dim), k, v, batch)
        return self.out(mixed_THd.flatten(1), batch)

    def cache(self, window: int = 0) -> CacheKind:
        """window: maximum keys that a row attends to, 0 for all."""
        return attention(self.kv_heads, self.head_dim, window, self.value_dim)

    def split(self, mesh: Mesh, segments: Segments) -> None:
        """Splits the heads, together with the matching segments of the output projection. With fewer KV heads than
        parts, adjacent ranks hold the same KV head. A norm over all heads, one with weights for each, and tables of
        positions need all of them on every rank."""
        if self.whole_norm or self.relative or isinstance(self.q_norm, HeadsLayerNorm):
            return
        heads, kv_heads, cuts = self.heads, self.kv_heads, segments(self.out)
        parts = mesh.most_parts(lambda p: cuts % p == 0 and heads % p == 0 and (kv_heads % p == 0 or p % kv_heads == 0))
        part = mesh.part(parts)
        self.heads, self.kv_heads = heads // parts, max(1, kv_heads // parts)
        self.qkv.hold_units("q", heads, part * self.heads, self.heads)
        for name in self.qkv.outputs.keys() & {"k", "v"}:
            self.qkv.hold_units(name, kv_heads, part * kv_heads // parts, self.kv_heads)
        self.out.hold_part(mesh, parts)
        if self.sinks:
            self.sinks.held = part * self.heads, (part + 1) * self.heads

    def mix(self, q_THd: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """The attention output of each head, float32 [T, H, e]. k: [T, K * d], v: [T, K * e]."""
        k_TKd = k.view(-1, self.kv_heads, self.head_dim)
        v_TKe = v.view(-1, self.kv_heads, self.value_dim)
        if self.value_scale != 1.0:
            v_TKe = v_TKe * self.value_scale
        for step in (self._rotated, self._normalised) if self.norm_after_rope else (self._normalised, self._rotated):
            q_THd, k_TKd = step(q_THd, k_TKd, batch)
        batch.store(self.layer, k_TKd, v_TKe)
        sinks_H = self.sinks.values if self.sinks else None
        relative = self.relative.tables() if self.relative else None
        batch.note_weights(self.model_layer, self.layer, q_THd, k_TKd, self.scale, self.softcap, sinks_H, relative)
        return paged_attention(
            q_THd,
            batch.kv.k(self.layer),
            batch.kv.v(self.layer),
            batch.attention(self.layer, self.heads // self.kv_heads),
            self.scale,
            self.softcap,
            sinks_H,
            relative,
            k_TKd if relative is not None and relative.queries is not None else None,
            self.value_dim,
        )

    def _normalised(self, q_THd: Tensor, k_TKd: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return q_THd, k_TKd
        if not self.whole_norm:
            return self.q_norm(q_THd), self.k_norm(k_TKd)
        q_TD, k_TD = self.q_norm(q_THd.flatten(1)), self.k_norm(k_TKd.flatten(1))
        return q_TD.view(-1, self.heads, self.head_dim), k_TD.view(-1, self.kv_heads, self.head_dim)

    def _rotated(self, q_THd: Tensor, k_TKd: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        if self.query_rope is not None:
            q_THd = self.query_rope(q_THd, batch.angles(self.query_rope))
        return q_THd, k_TKd if self.rope is None else self.rope(k_TKd, batch.angles(self.rope))


class GatedAttention(Attention):
    """Attention whose output is multiplied per head by the sigmoid of a gate projection."""

    def __init__(self, layer: int, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any):
        super().__init__(layer, width, heads, kv_heads, head_dim, **options)
        self.gate = Plain(width, heads * head_dim, options.get("bias", False))

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.qkv(x_TD, batch)
        gate_THd = self.gate(x_TD, batch).view(-1, self.heads, self.head_dim)
        mixed_THd = self.mix(q.view(-1, self.heads, self.head_dim), k, v, batch)
        return self.out((sigmoid(gate_THd) * mixed_THd).flatten(1), batch)

    def split(self, mesh: Mesh, segments: Segments) -> None:
        heads = self.heads
        super().split(mesh, segments)
        self.gate.hold_units("weight", heads, mesh.part(heads // self.heads) * self.heads, self.heads)


class HeadGatedAttention(Attention):
    """Attention whose heads are each multiplied by the sigmoid of one number, a projection of the layer's input."""

    def __init__(self, layer: int, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any):
        super().__init__(layer, width, heads, kv_heads, head_dim, **options)
        self.gate = Plain(width, heads)

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.qkv(x_TD, batch)
        gate_TH = sigmoid(self.gate(x_TD, batch))
        mixed_THd = self.mix(q.view(-1, self.heads, self.head_dim), k, v, batch)
        return self.out(scale_heads(mixed_THd, gate_TH).flatten(1), batch)

    def split(self, mesh: Mesh, segments: Segments) -> None:
        """Stays whole on every rank: libraries add in another order for the few columns of a part of the gate."""
