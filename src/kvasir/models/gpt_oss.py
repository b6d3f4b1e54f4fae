"""gpt-oss (arXiv:2508.10925): a Llama with attention sinks, a window in every second layer, and mixtures of experts
with biases and a clamped gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.layers.module import Entry
from kvasir.layers.moe import MoE, Routing
from kvasir.models.config import MAX_POSITIONS, Fields, read_sliding_layers
from kvasir.models.decoder import read_sizes
from kvasir.models.mixtral import Mixtral, MixtralConfig, expert_names, read_experts

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_DEFAULTS = {"rms_norm_eps": 1e-5, "sliding_window": 128, "max_position_embeddings": 131072, "rope_theta": 150000.0}


@dataclass(frozen=True, slots=True)
class GptOssConfig(MixtralConfig):
    """The sizes and settings of a gpt-oss."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> GptOssConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        rope = {} if config.get("rope_scaling") or config.get("rope_parameters") else {"rope_scaling": _YARN}
        f = Fields({**_DEFAULTS, **rope, **config})
        sizes = read_sizes(f, kv_heads=8, head_dim=64)
        layers = sizes["num_layers"]
        for copy in ("experts_per_token", "initial_context_length"):  # of other fields
            f.get(copy)
        num_experts, top_k = read_experts(f, num_experts=128, top_k=4)
        f.expect("swiglu_limit", 7.0)
        f.expect("swiglu_alpha", 1.702)
        bias = f.flag("attention_bias", True)
        window = f.integer("sliding_window", 1, MAX_POSITIONS)
        slides = read_sliding_layers(f, layers) or tuple(i % 2 == 0 for i in range(layers))
        f.finish()
        return cls(
            **sizes,
            windows=tuple(window if sliding else 0 for sliding in slides),
            num_experts=num_experts,
            routing=Routing(top_k),
            expert_inner=sizes["inner"],
            sparse=(True,) * layers,
            qkv_bias=bias,
            out_bias=bias,
        )


class GptOss(Mixtral):
    """A Mixtral with sinks, and with biases in the experts."""

    Config = GptOssConfig
    transposed_experts = True

    def _attention_options(self, layer: int, c: GptOssConfig) -> dict[str, Any]:
        return {**super()._attention_options(layer, c), "sinks": True}

    def _mlp(self, layer: int, c: GptOssConfig) -> MoE:
        return MoE(c.width, c.expert_inner, c.num_experts, c.routing, act="clamped_swiglu", bias=True)

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Mixtral.names`, with the names that `ExpertsView` gives to the experts' tensors."""
        layer = "model.layers.*."
        return {
            **super().names(),
            "layers.*.attn.sinks": layer + "self_attn",
            "layers.*.mlp.router": layer + "mlp.router",
            **expert_names(layer + "mlp."),
        }
