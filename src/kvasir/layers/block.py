"""A transformer block: attention and an MLP, with norms before or after each, one after the other or in parallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvasir.layers.attention import Attention
from kvasir.layers.beside import DenseAndExperts
from kvasir.layers.convolution import ShortConvolution
from kvasir.layers.gated_delta import GatedDelta
from kvasir.layers.latent_attention import LatentAttention
from kvasir.layers.mlp import MLP, GatedMLP
from kvasir.layers.module import Module
from kvasir.layers.moe import MoE
from kvasir.layers.norm import RMSNorm
from kvasir.layers.rwkv import ChannelMix, TimeMix
from kvasir.layers.ssm import Mamba1, Mamba2

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch

# What mixes across tokens.
Mixer = Attention | LatentAttention | GatedDelta | Mamba1 | Mamba2 | ShortConvolution | TimeMix | ChannelMix


class DecoderLayer(Module):
    """x: float32 [T, D] -> [T, D].

    attn: the layer that mixes information across tokens (attention or a recurrent layer). It or the MLP may be None: a
    model may have only one of them in a block. attn_norm, mlp_norm: of the
    inputs; attn_post_norm, mlp_post_norm: of the outputs; None for none. parallel: the MLP's input is the block's, not
    attention's result; without an mlp_norm, both have the normalised input of attention. scale: of what both add.
    """

    def __init__(
        self,
        attn_norm: RMSNorm | None,
        attn: Mixer | None,
        mlp_norm: RMSNorm | None,
        mlp: MLP | GatedMLP | MoE | DenseAndExperts | None,
        *,
        attn_post_norm: RMSNorm | None = None,
        mlp_post_norm: RMSNorm | None = None,
        parallel: bool = False,
        scale: float = 1.0,
    ):
        self.attn_norm, self.attn, self.attn_post_norm = attn_norm, attn, attn_post_norm
        self.mlp_norm, self.mlp, self.mlp_post_norm = mlp_norm, mlp, mlp_post_norm
        self.parallel, self.scale = parallel, scale

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        read_TD, mixed_TD = x_TD, x_TD
        if self.attn is not None:
            read_TD = _normalised(self.attn_norm, x_TD)
            mixed_TD = x_TD + self._scaled(_normalised(self.attn_post_norm, self.attn(read_TD, batch)))
        if self.mlp is None:
            return mixed_TD
        if not self.parallel:
            read_TD = _normalised(self.mlp_norm, mixed_TD)
        elif self.mlp_norm is not None:
            read_TD = self.mlp_norm(x_TD)
        return mixed_TD + self._scaled(_normalised(self.mlp_post_norm, self.mlp(read_TD, batch)))

    def _scaled(self, x_TD: Tensor) -> Tensor:
        return x_TD if self.scale == 1.0 else x_TD * self.scale


def _normalised(norm: RMSNorm | None, x_TD: Tensor) -> Tensor:
    return x_TD if norm is None else norm(x_TD)
