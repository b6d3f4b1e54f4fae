"""Solar Open: a GLM-4.5 without dense layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvasir.models.config import MAX_LAYERS, Fields
from kvasir.models.decoder import read_sizes
from kvasir.models.glm4_moe import Glm4Moe, Glm4MoeConfig, read_deepseek_experts

_DEFAULTS = {
    "rms_norm_eps": 1e-5, "rope_theta": 1e6, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "moe_intermediate_size": 1280, "first_k_dense_replace": 0,
}  # fmt: skip


class SolarOpenConfig(Glm4MoeConfig):
    """The sizes and settings of a Solar Open."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Glm4MoeConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, "intermediate_size": 1, **config})  # of dense layers, which there are not
        f.expect("first_k_dense_replace", 0)
        f.expect("use_qk_norm", False)
        sizes, bias = read_sizes(f, kv_heads=8, head_dim=128, partial=True), f.flag("attention_bias", False)
        layers, drafting = sizes["num_layers"], f.integer("num_nextn_predict_layers", 0, MAX_LAYERS, 0)
        experts = read_deepseek_experts(f, layers)
        f.finish()
        return cls(**sizes, **experts, windows=(0,) * layers, qkv_bias=bias, drafting=drafting)


class SolarOpen(Glm4Moe):
    """A GLM-4.5 whose layers all have experts."""

    Config = SolarOpenConfig
