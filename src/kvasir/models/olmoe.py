"""OLMoE (arXiv:2409.02060): a mixture of small experts, with norms over all heads of q and k together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvasir.layers.moe import Routing
from kvasir.models.config import Fields
from kvasir.models.decoder import read_sizes
from kvasir.models.mixtral import read_experts
from kvasir.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig


class OlmoeConfig(Qwen3MoeConfig):
    """The sizes and settings of an OLMoE."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen3MoeConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({"rms_norm_eps": 1e-5, **config})
        sizes, bias = read_sizes(f), f.flag("attention_bias", False)
        layers = sizes["num_layers"]
        num_experts, top_k = read_experts(f, num_experts=64, top_k=8)
        f.expect("clip_qkv", None)
        routing = Routing(top_k, normalise=f.flag("norm_topk_prob", False))
        f.finish()
        return cls(
            **sizes,
            windows=(0,) * layers,
            sparse=(True,) * layers,
            num_experts=num_experts,
            routing=routing,
            expert_inner=sizes["inner"],
            qkv_bias=bias,
            out_bias=bias,
            head_norm=True,
        )


class Olmoe(Qwen3Moe):
    """A Qwen3 with experts whose norms of q and k are over all heads."""

    Config = OlmoeConfig

    def _attention_options(self, layer: int, c: Any) -> dict[str, Any]:
        return {**super()._attention_options(layer, c), "whole_norm": True}
