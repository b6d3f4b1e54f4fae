"""Gemma 2 (arXiv:2408.00118): four norms per block, soft caps on scores and logits, sliding windows on every other
layer.

Gemma 3 uses these blocks too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import ml_dtypes
import numpy as np

from kvasir.layers.embedding import Embedding
from kvasir.layers.module import Entry
from kvasir.layers.norm import OffsetRMSNorm, RMSNorm
from kvasir.layers.softcap import SoftCap
from kvasir.models.config import MAX_POSITIONS, Fields, read_sliding_layers
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama

if TYPE_CHECKING:
    from torch import Tensor

# letters: R chosen rows, D model width

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
    """attn_softcap, final_softcap: 0 for none."""

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


def root_of_width(table: Embedding, width: int) -> float:
    """The square root of a width, rounded to the table's dtype."""
    kind = str(getattr(table.weight, "dtype", "bfloat16")).removeprefix("torch.")
    scale = np.float32(width**0.5)
    return float(ml_dtypes.bfloat16(scale) if kind == "bfloat16" else np.dtype(kind).type(scale))


class Gemma2(Llama):
    """A Llama with four norms per block, scaled embeddings and capped logits."""

    Config = Gemma2Config
    config: Gemma2Config
    Norm: ClassVar[type[RMSNorm]] = OffsetRMSNorm
    norms: ClassVar[tuple[str, ...]] = ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")

    def __init__(self, config: Gemma2Config):
        super().__init__(config)
        self.softcap = SoftCap(config.final_softcap)

    def _attention_options(self, layer: int, c: Gemma2Config) -> dict[str, Any]:
        return {**super()._attention_options(layer, c), "softcap": c.attn_softcap}

    @property
    def embed_scale(self) -> float:
        """The square root of the width, rounded to the embedding table's dtype, as in training."""
        return root_of_width(self.embed, self.config.width)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Float32 [R, vocabulary] logits of the selected hidden rows, soft-capped."""
        return self.softcap(super().logits(hidden_RD))

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the two additional norms."""
        layer = "model.layers.*."
        return {
            **super().names(),
            "layers.*.attn_post_norm": layer + "post_attention_layernorm",
            "layers.*.mlp_norm": layer + "pre_feedforward_layernorm",
            "layers.*.mlp_post_norm": layer + "post_feedforward_layernorm",
        }
