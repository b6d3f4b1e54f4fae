"""MiniCPM3 (arXiv:2404.06395): a dense decoder with the latent attention of DeepSeek-V2, whose rotated dimensions are
halves, and with multipliers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvasir.models.config import MAX_WIDTH, Fields
from kvasir.models.deepseek_v2 import LatentConfig, LatentDecoder, latent_fields, read_latent

_DEFAULTS = {
    "vocab_size": 73448, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "scale_emb": 12,
    "scale_depth": 1.4, "dim_model_base": 256,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MiniCPM3Config(LatentConfig):
    """The sizes and settings of a MiniCPM3."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = latent_fields(config, _DEFAULTS)
        if f.values.get("v_head_dim") is None:
            f.values = {**f.values, "v_head_dim": _whole_head(f)}
        sizes = read_latent(f)
        f.expect("mlp_bias", False)
        layers, width = sizes["num_layers"], sizes["width"]
        depth = f.number("scale_depth", 0.0, 1e6, math.sqrt(layers))
        base = f.integer("dim_model_base", 1, MAX_WIDTH, width)
        embed = f.number("scale_emb", 0.0, 1e6, 1.0)
        f.finish()
        return cls(
            **sizes,
            sparse=(False,) * layers,
            interleaved=False,
            embed_scale=embed,
            residual_scale=depth / math.sqrt(layers),
            logit_scale=base / width,
        )


def _whole_head(f: Fields) -> int:
    return f.integer("hidden_size", 1, MAX_WIDTH) // f.integer("num_attention_heads", 1, MAX_WIDTH)


class MiniCPM3(LatentDecoder):
    """A dense decoder with latent attention."""

    Config = MiniCPM3Config
    selection: ClassVar[str] = ""
