"""Attention and a gated MLP with a norm before their last matrices (BitNet b1.58, arXiv:2402.17764). The norm needs a
whole row, so ranks hold these layers whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvasir.layers.attention import Attention
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.module import Segments
from kvasir.layers.norm import RMSNorm
from kvasir.parallel import Mesh

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch


class NormedAttention(Attention):
    """Attention with a norm over all heads before the output projection. Ranks hold the whole layer."""

    def __init__(self, layer: int, width: int, heads: int, kv_heads: int, head_dim: int, eps: float, **options: Any):
        super().__init__(layer, width, heads, kv_heads, head_dim, **options)
        self.sub_norm = RMSNorm(heads * head_dim, eps)

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.qkv(x_TD, batch)
        mixed_THd = self.mix(q.view(-1, self.heads, self.head_dim), k, v, batch)
        return self.out(self.sub_norm(mixed_THd.flatten(1)), batch)

    def split(self, mesh: Mesh, segments: Segments) -> None:
        """Stays whole."""


class NormedMLP(GatedMLP):
    """A gated MLP with a norm before its last matrix. Ranks hold the whole layer."""

    def __init__(self, width: int, inner: int, act: str, eps: float):
        super().__init__(width, inner, act)
        self.sub_norm = RMSNorm(inner, eps)

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        gate_TI, up_TI = self.gate_up(x_TD, batch)
        return self.down(self.sub_norm(self.act(gate_TI) * up_TI), batch)

    def split(self, mesh: Mesh, segments: Segments) -> None:
        """Stays whole."""
