"""GLM-4.7-Flash: a GLM-4.5 (arXiv:2508.06471) with latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kvasir.errors import ModelFileError, quoted
from kvasir.models.config import MAX_LAYERS, Fields
from kvasir.models.deepseek_v2 import LatentConfig, LatentDecoder, latent_fields, read_latent
from kvasir.models.glm4_moe import read_deepseek_experts

_DEFAULTS = {
    "vocab_size": 154880, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "kv_lora_rank": 512,
    "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 64,
    "n_shared_experts": 1, "moe_intermediate_size": 1536, "num_experts_per_tok": 4, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Glm4MoeLiteConfig(LatentConfig):
    """The sizes and settings of a GLM-4.7-Flash."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = latent_fields(config, _DEFAULTS)
        sizes = read_latent(f)
        experts = read_deepseek_experts(f, sizes["num_layers"])
        experts["sparse"] = read_sparse_layers(f, sizes["num_layers"]) or experts["sparse"]
        drafting = f.integer("num_nextn_predict_layers", 0, MAX_LAYERS, 0)
        interleaved = f.flag("rope_interleave", True)
        f.finish()
        return cls(**sizes, **experts, drafting=drafting, interleaved=interleaved)


def read_sparse_layers(f: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers have experts, from `mlp_layer_types`; empty if the field is absent. Raises ModelFileError."""
    kinds = f.get("mlp_layer_types")
    if kinds is None:
        return ()
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in ("dense", "sparse") for kind in kinds):
        raise ModelFileError(
            f"{f.where}: mlp_layer_types is {quoted(kinds)}",
            f'expected "dense" or "sparse" for {layers} layers',
        )
    return tuple(kind == "sparse" for kind in kinds)


class Glm4MoeLite(LatentDecoder):
    """A decoder with latent attention and experts chosen by sigmoid scores."""

    Config = Glm4MoeLiteConfig
