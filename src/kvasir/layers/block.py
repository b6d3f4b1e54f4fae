"""A transformer block of the pre-norm kind, as its parts: how they are joined stands in the model's forward."""

from __future__ import annotations

from kvasir.layers.attention import Attention
from kvasir.layers.mlp import MLP, GatedMLP
from kvasir.layers.module import Module


class Block(Module):
    def __init__(self, attn_norm: Module, attn: Attention, mlp_norm: Module, mlp: MLP | GatedMLP):
        self.attn_norm, self.attn, self.mlp_norm, self.mlp = attn_norm, attn, mlp_norm, mlp
