"""Llama 1 to 3 and models of the same architecture (arXiv:2302.13971, arXiv:2407.21783).

Mistral, Qwen2 and Qwen3 are this model with other settings; their files read their configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvasir.layers.attention import Attention
from kvasir.layers.block import DecoderLayer
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.moe import MoE
from kvasir.layers.norm import RMSNorm
from kvasir.models.config import Fields
from kvasir.models.decoder import Decoder, DecoderConfig, read_sizes

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch

# letters: T packed token rows, D model width


@dataclass(frozen=True, slots=True)
class LlamaConfig(DecoderConfig):
    """The sizes and settings of a Llama."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields(config)
        sizes = read_sizes(f)
        attention_bias, mlp_bias = f.flag("attention_bias", False), f.flag("mlp_bias", False)
        f.finish()
        windows = (0,) * sizes["num_layers"]
        return cls(**sizes, windows=windows, qkv_bias=attention_bias, out_bias=attention_bias, mlp_bias=mlp_bias)


class Llama(Decoder):
    """A decoder with RMSNorms before attention and the MLP, rotary embeddings and gated MLPs."""

    Config = LlamaConfig

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        self.layers = [self._block(i, config) for i in range(config.num_layers)]

    def _block(self, layer: int, c: DecoderConfig) -> DecoderLayer:
        return DecoderLayer(
            RMSNorm(c.width, c.norm_eps),
            Attention(
                layer,
                c.width,
                c.heads,
                c.kv_heads,
                c.head_dim,
                rope=self.rope,
                bias=c.qkv_bias,
                out_bias=c.out_bias,
                head_norm_eps=c.norm_eps if c.head_norm else None,
            ),
            RMSNorm(c.width, c.norm_eps),
            self._mlp(layer, c),
        )

    def _mlp(self, layer: int, c: Any) -> GatedMLP | MoE:
        """The part of a layer that follows attention. Families with experts override it."""
        return GatedMLP(c.width, c.inner, c.act, c.mlp_bias)

    def forward(self, tokens_T: Tensor, batch: Batch) -> Tensor:
        """Float32 [T, D]: the hidden rows after the last norm."""
        x_TD = self.embed(tokens_T)
        for i, layer in enumerate(self.layers):
            x_TD = x_TD + layer.attn(layer.attn_norm(x_TD), batch)
            x_TD = x_TD + layer.mlp(layer.mlp_norm(x_TD), batch)
            batch.after_layer(i, x_TD)
        return self.norm(x_TD)
