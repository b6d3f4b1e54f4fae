"""MiniMax-M2: a Mixtral with experts chosen by sigmoid scores, a norm over all heads of q and of k, and a rotary
embedding of a part of each head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.layers.module import Entry
from kvasir.layers.moe import Routing
from kvasir.models.config import MAX_HEAD_DIM, Fields
from kvasir.models.decoder import read_sizes
from kvasir.models.mixtral import Mixtral, MixtralConfig, read_experts

_DEFAULTS = {"rope_theta": 5e6, "head_dim": 128}
_OF_OTHER_MODELS = (
    *("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"),
    *("mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "use_mtp", "shared_moe_mode"),
)


@dataclass(frozen=True, slots=True)
class MiniMaxM2Config(MixtralConfig):
    """The sizes and settings of a MiniMax-M2."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> MiniMaxM2Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        if (rotated := f.integer("rotary_dim", 2, MAX_HEAD_DIM, 0)) and "partial_rotary_factor" not in f.values:
            f.values = {**f.values, "partial_rotary_factor": rotated / f.integer("head_dim", 2, MAX_HEAD_DIM)}
        sizes = read_sizes(f, kv_heads=8, partial=True)
        layers = sizes["num_layers"]
        for name in _OF_OTHER_MODELS:
            f.get(name)
        f.expect("sliding_window", None)
        f.expect("shared_intermediate_size", 0)
        f.expect("scoring_func", "sigmoid")
        f.expect("use_routing_bias", True)
        f.expect("use_qk_norm", True)
        f.expect("qk_norm_type", "per_layer")
        f.expect("attn_type_list", [1] * layers)
        num_experts, top_k = read_experts(f, num_experts=256, top_k=8)
        f.finish()
        return cls(
            **sizes,
            windows=(0,) * layers,
            num_experts=num_experts,
            routing=Routing(top_k, "sigmoid"),
            expert_inner=sizes["inner"],
            sparse=(True,) * layers,
            head_norm=True,
        )


class MiniMaxM2(Mixtral):
    """A Mixtral with a selection bias and norms over all heads."""

    Config = MiniMaxM2Config
    selection = "e_score_correction_bias"

    @property
    def ignored(self) -> tuple[str, ...]:
        """As `Decoder.ignored`, and the modules for multi-token prediction."""
        return (*super().ignored, r"model\.mtp\..*")

    def _attention_options(self, layer: int, c: MiniMaxM2Config) -> dict[str, Any]:
        return {**super()._attention_options(layer, c), "whole_norm": True}

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Mixtral.names`, with the selection bias."""
        return {**super().names(), "layers.*.mlp.selection": "model.layers.*.block_sparse_moe"}
