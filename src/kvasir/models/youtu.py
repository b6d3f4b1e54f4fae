"""Youtu-LLM: a decoder with the latent attention of DeepSeek-V3 and dense MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvasir.models.deepseek_v2 import LatentConfig, LatentDecoder, latent_fields, read_latent

_DEFAULTS = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "tie_word_embeddings": True,
}  # fmt: skip


class YoutuConfig(LatentConfig):
    """The sizes and settings of a Youtu-LLM."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LatentConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = latent_fields(config, _DEFAULTS)
        f.get("embedding_initializer_range")
        f.expect("mlp_bias", False)
        sizes, interleaved = read_latent(f), f.flag("rope_interleave", True)
        f.finish()
        return cls(**sizes, sparse=(False,) * sizes["num_layers"], interleaved=interleaved)


class Youtu(LatentDecoder):
    """A decoder with latent attention."""

    Config = YoutuConfig
