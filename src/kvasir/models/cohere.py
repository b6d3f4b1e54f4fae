"""Command R and Aya (Cohere): attention and MLP in parallel after one LayerNorm without a bias, rotary embeddings of
neighbouring pairs, scaled logits; the largest models normalise each head of q and k with weights of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.layers.attention import Attention
from kvasir.layers.norm import HeadsLayerNorm
from kvasir.models.cohere2 import Cohere2
from kvasir.models.config import Fields
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.rope import pairs

_DEFAULTS = {"layer_norm_eps": 1e-5, "tie_word_embeddings": True, "logit_scale": 0.0625, "rope_theta": 500000.0}


@dataclass(frozen=True, slots=True)
class CohereConfig(DecoderConfig):
    """The sizes and settings of a Cohere."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> CohereConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        # Command R states the length that it was trained for beside the one of its positions.
        if f.get("model_max_length") is not None:
            f.values = {**f.values, "max_position_embeddings": f.get("model_max_length")}
        sizes, bias = read_sizes(f, eps="layer_norm_eps"), f.flag("attention_bias", False)
        scale, head_norm = f.number("logit_scale", 1e-6, 1e6), f.flag("use_qk_norm", False)
        f.finish()
        return cls(
            **sizes,
            windows=(0,) * sizes["num_layers"],
            qkv_bias=bias,
            out_bias=bias,
            head_norm=head_norm,
            logit_scale=scale,
        )


class Cohere(Cohere2):
    """A Cohere 2 whose layers all rotate and have no windows."""

    Config = CohereConfig

    def _mixer(self, layer: int, c: Any) -> Attention:
        attn = super()._mixer(layer, c)
        assert isinstance(attn, Attention)
        if c.head_norm:
            order = pairs(c.head_dim, c.rotary_dim)
            attn.q_norm = HeadsLayerNorm(c.heads, c.head_dim, c.norm_eps, order)
            attn.k_norm = HeadsLayerNorm(c.kv_heads, c.head_dim, c.norm_eps, order)
        return attn
