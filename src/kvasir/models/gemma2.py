"""Gemma 2 (arXiv:2408.00118): four norms per block, soft caps on scores and logits, sliding windows on every other
layer.

Gemma 3 uses these blocks and this forward too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from kvasir.layers.attention import Attention
from kvasir.layers.block import DecoderLayer
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.module import Take
from kvasir.layers.norm import OffsetRMSNorm
from kvasir.layers.rope import Rope
from kvasir.layers.softcap import SoftCap
from kvasir.models.config import MAX_POSITIONS, Fields, read_sliding_layers
from kvasir.models.decoder import Decoder, DecoderConfig, read_sizes

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch

# letters: T packed token rows, D model width, R chosen rows

_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


@dataclass(frozen=True, slots=True)
class Gemma2Config(DecoderConfig):
    """attn_scale: factor of the attention scores. attn_softcap, final_softcap: 0 for none."""

    attn_scale: float = 1.0
    attn_softcap: float = 0.0
    final_softcap: float = 0.0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Gemma2Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        settings = read_gemma(f, default_pattern=2)
        settings["attn_softcap"] = f.number("attn_logit_softcapping", 1e-3, 1e6, 0.0)
        f.finish()
        return cls(**settings)


def read_gemma(f: Fields, default_pattern: int) -> dict[str, Any]:
    """The fields that Gemma configs share, as keyword arguments of `Gemma2Config`. default_pattern: without
    `layer_types`, every `default_pattern`th layer has full attention."""
    sizes = read_sizes(f, act="hidden_activation")
    f.get("hidden_act")  # a field of Gemma 1; transformers does not read it either
    f.expect("use_bidirectional_attention", False)
    layers = sizes["num_layers"]
    slides = read_sliding_layers(f, layers) or [(i + 1) % default_pattern != 0 for i in range(layers)]
    window = f.integer("sliding_window", 1, MAX_POSITIONS)
    bias = f.flag("attention_bias", False)
    return {
        **sizes,
        "windows": tuple(window if sliding else 0 for sliding in slides),
        "qkv_bias": bias,
        "out_bias": bias,
        "attn_scale": 1 / math.sqrt(f.number("query_pre_attn_scalar", 1e-3, 1e6, 256.0)),
        "final_softcap": f.number("final_logit_softcapping", 1e-3, 1e6, 0.0),
    }


class GemmaBlock(DecoderLayer):
    """A block that normalises before and after attention and the MLP."""

    def __init__(self, attn: Attention, mlp: GatedMLP, width: int, eps: float):
        super().__init__(OffsetRMSNorm(width, eps), attn, OffsetRMSNorm(width, eps), mlp)
        self.attn_post_norm = OffsetRMSNorm(width, eps)
        self.mlp_post_norm = OffsetRMSNorm(width, eps)


class Gemma2(Decoder):
    """A decoder of `GemmaBlock`s with scaled embeddings and capped logits."""

    Config = Gemma2Config
    config: Gemma2Config
    layers: list[GemmaBlock]

    def __init__(self, config: Gemma2Config):
        super().__init__(config)
        self.norm = OffsetRMSNorm(config.width, config.norm_eps)
        self.softcap = SoftCap(config.final_softcap)
        self.layers = [self._block(i, config) for i in range(config.num_layers)]

    def _rope_of(self, layer: int) -> Rope:
        return self.rope

    def _block(self, layer: int, c: Gemma2Config) -> GemmaBlock:
        attn = Attention(
            layer,
            c.width,
            c.heads,
            c.kv_heads,
            c.head_dim,
            rope=self._rope_of(layer),
            bias=c.qkv_bias,
            out_bias=c.out_bias,
            head_norm_eps=c.norm_eps if c.head_norm else None,
            head_norm=OffsetRMSNorm,
            scale=c.attn_scale,
            softcap=c.attn_softcap,
        )
        return GemmaBlock(attn, GatedMLP(c.width, c.inner, c.act), c.width, c.norm_eps)

    @property
    def embed_scale(self) -> float:
        """The square root of the width, rounded to the embedding table's dtype, as in training."""
        kind = str(getattr(self.embed.weight, "dtype", "bfloat16")).removeprefix("torch.")
        scale = np.float32(self.config.width**0.5)
        return float(ml_dtypes.bfloat16(scale) if kind == "bfloat16" else np.dtype(kind).type(scale))

    def forward(self, tokens_T: Tensor, batch: Batch) -> Tensor:
        """Float32 [T, D]: the hidden rows after the last norm."""
        x_TD = self.embed(tokens_T) * self.embed_scale
        for i, layer in enumerate(self.layers):
            x_TD = x_TD + layer.attn_post_norm(layer.attn(layer.attn_norm(x_TD), batch))
            x_TD = x_TD + layer.mlp_post_norm(layer.mlp(layer.mlp_norm(x_TD), batch))
            batch.after_layer(i, x_TD)
        return self.norm(x_TD)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Float32 [R, vocabulary] logits of the selected hidden rows, soft-capped."""
        return self.softcap(super().logits(hidden_RD))

    def names(self) -> Mapping[str, str | Take | tuple[str, ...]]:
        """The name table of `Decoder.names`, with the two additional norms."""
        layer = "model.layers.*."
        return {
            **super().names(),
            "layers.*.attn_post_norm": layer + "post_attention_layernorm",
            "layers.*.mlp_norm": layer + "pre_feedforward_layernorm",
            "layers.*.mlp_post_norm": layer + "post_feedforward_layernorm",
        }
