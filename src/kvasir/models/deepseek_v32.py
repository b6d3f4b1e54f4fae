"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 whose tokens attend to the `index_topk` earlier ones that an indexer chooses. Up
to that many tokens the choice is all of them, and so far we end the context there: the indexer is not computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kvasir.errors import UnsupportedModel, quoted
from kvasir.models.config import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_POSITIONS, Fields
from kvasir.models.deepseek_v2 import LatentConfig, LatentDecoder, latent_fields, read_latent
from kvasir.models.glm4_moe import read_deepseek_experts
from kvasir.models.glm4_moe_lite import read_sparse_layers

_DEEPSEEK = {
    "vocab_size": 129280, "max_position_embeddings": 163840, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
_KINDS = ("indexed_attention", "deepseek_sparse_attention")
_GLM = {
    **_DEEPSEEK, "vocab_size": 154880, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "q_lora_rank": 2048,
    "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1, "topk_group": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeepseekV32Config(LatentConfig):
    """The sizes and settings of a DeepSeek-V3.2. chosen: how many tokens the indexer chooses."""

    chosen: int = 0

    @property
    def context_length(self) -> int:
        """Maximum tokens of a sequence: those that the indexer would all choose."""
        return min(self.chosen, self.rope_scaling.context_length(self.max_position))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = latent_fields(config, _GLM if config.get("model_type") == "glm_moe_dsa" else _DEEPSEEK)
        sizes = read_latent(f)
        layers = sizes["num_layers"]
        experts = read_deepseek_experts(f, layers)
        experts["sparse"] = read_sparse_layers(f, layers) or experts["sparse"]
        chosen = f.integer("index_topk", 1, MAX_POSITIONS, 2048)
        f.integer("index_head_dim", 1, MAX_HEAD_DIM, 128)
        f.integer("index_n_heads", 1, MAX_HEADS, 64)
        _ignore_indexer(f)
        f.expect("mlp_bias", False)
        drafting = f.integer("num_nextn_predict_layers", 0, MAX_LAYERS, f.integer("num_mtp_layers", 0, MAX_LAYERS, 0))
        interleaved = f.flag("rope_interleave", True)
        f.finish()
        return cls(**sizes, **experts, drafting=drafting, interleaved=interleaved, chosen=chosen)


def _ignore_indexer(f: Fields) -> None:
    """Reads what only the indexer uses, and the kinds of layers, which all have one. Raises UnsupportedModel."""
    for name in ("indexer_types", "indexer_rope_interleave", "index_topk_pattern", "index_topk_freq"):
        f.get(name)
    kinds = f.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind not in _KINDS for kind in kinds):
        raise UnsupportedModel(f"{f.where}: layer_types is {quoted(kinds)}", f"supported: {', '.join(_KINDS)}")


class DeepseekV32(LatentDecoder):
    """A DeepSeek-V3 with a context that needs no indexer."""

    Config = DeepseekV32Config
    config: DeepseekV32Config

    @property
    def ignored(self) -> tuple[str, ...]:
        """As `Glm4Moe.ignored`, and the indexers."""
        return (*super().ignored, r"model\.layers\.\d+\.self_attn\.indexers?(_proj)?\..*")
