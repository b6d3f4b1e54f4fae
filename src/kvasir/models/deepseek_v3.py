"""DeepSeek-V3 and R1 (arXiv:2412.19437): DeepSeek-V2 with experts chosen by sigmoid scores and a bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kvasir.models.config import MAX_LAYERS
from kvasir.models.deepseek_v2 import LatentConfig, LatentDecoder, latent_fields, read_latent
from kvasir.models.glm4_moe import read_deepseek_experts

_DEFAULTS = {
    "vocab_size": 129280, "max_position_embeddings": 4096, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
    "routed_scaling_factor": 2.5,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeepseekV3Config(LatentConfig):
    """The sizes and settings of a DeepSeek-V3."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = latent_fields(config, _DEFAULTS)
        sizes = read_latent(f)
        experts = read_deepseek_experts(f, sizes["num_layers"])
        drafting = f.integer("num_nextn_predict_layers", 0, MAX_LAYERS, f.integer("num_mtp_layers", 0, MAX_LAYERS, 0))
        interleaved = f.flag("rope_interleave", True)
        f.finish()
        return cls(**sizes, **experts, drafting=drafting, interleaved=interleaved)


class DeepseekV3(LatentDecoder):
    """A decoder with latent attention and experts chosen by sigmoid scores."""

    Config = DeepseekV3Config
