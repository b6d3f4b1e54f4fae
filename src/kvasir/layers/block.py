"""A transformer block as a container of its parts; the model's forward connects them."""

from __future__ import annotations

from kvasir.layers.attention import Attention
from kvasir.layers.gated_delta import GatedDelta
from kvasir.layers.mlp import MLP, GatedMLP
from kvasir.layers.module import Module
from kvasir.layers.moe import MoE
from kvasir.layers.norm import RMSNorm


class DecoderLayer(Module):
    """attn: the layer that mixes information across tokens (attention or a recurrent layer)."""

    def __init__(self, attn_norm: RMSNorm, attn: Attention | GatedDelta, mlp_norm: RMSNorm, mlp: MLP | GatedMLP | MoE):
        self.attn_norm, self.attn, self.mlp_norm, self.mlp = attn_norm, attn, mlp_norm, mlp
