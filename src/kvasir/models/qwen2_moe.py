"""Qwen1.5 and Qwen2 with mixtures of experts (arXiv:2407.10671): a Qwen2 with experts and a shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.layers.module import Entry
from kvasir.layers.moe import Routing
from kvasir.models.config import MAX_WIDTH, Fields, read_layer_windows
from kvasir.models.decoder import read_sizes
from kvasir.models.mixtral import expert_names, read_experts
from kvasir.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig, read_sparse_layers

_DEFAULTS = {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}


@dataclass(frozen=True, slots=True)
class Qwen2MoeConfig(Qwen3MoeConfig):
    """The sizes and settings of a Qwen2 with experts."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen2MoeConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        # transformers writes 0 for a window that is not used
        f = Fields({**_DEFAULTS, **config, "sliding_window": config.get("sliding_window") or None})
        sizes = read_sizes(f, kv_heads=16)
        layers = sizes["num_layers"]
        num_experts, top_k = read_experts(f, num_experts=60, top_k=4)
        settings = {
            "windows": read_layer_windows(f, layers),
            "num_experts": num_experts,
            "routing": Routing(top_k, normalise=f.flag("norm_topk_prob", False)),
            "expert_inner": f.integer("moe_intermediate_size", 1, MAX_WIDTH),
            "shared_inner": f.integer("shared_expert_intermediate_size", 1, MAX_WIDTH),
            "sparse": read_sparse_layers(f, layers),
            "qkv_bias": f.flag("qkv_bias", True),
        }
        f.finish()
        return cls(**sizes, **settings)


class Qwen2Moe(Qwen3Moe):
    """A Qwen2 whose sparse layers have a mixture with a shared expert."""

    Config = Qwen2MoeConfig
    config: Qwen2MoeConfig

    shared_gate = True

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Qwen3Moe.names`, with the shared expert."""
        mlp = "model.layers.*.mlp."
        return {
            **super().names(),
            **expert_names(mlp, "shared_expert"),
            "layers.*.mlp.shared_gate": mlp + "shared_expert_gate",
        }
