"""Qwen3, mixtures of experts (arXiv:2505.09388): Qwen3 with mixtures of experts in some or all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.errors import ModelFileError
from kvasir.layers.module import Entry
from kvasir.layers.moe import Routing
from kvasir.models.config import MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH, Fields
from kvasir.models.decoder import read_sizes
from kvasir.models.mixtral import Mixtral, MixtralConfig, expert_names, read_experts


@dataclass(frozen=True, slots=True)
class Qwen3MoeConfig(MixtralConfig):
    """The sizes and settings of a Qwen3 with experts."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen3MoeConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields(config)
        sizes = read_sizes(f, kv_heads=4)
        layers, bias = sizes["num_layers"], f.flag("attention_bias", False)
        window = f.integer("sliding_window", 1, MAX_POSITIONS, 4096 if "sliding_window" not in config else 0)
        if not f.flag("use_sliding_window", False):
            window = 0
        f.get("max_window_layers")  # only the dense Qwen models use it; here all layers share the window
        num_experts, top_k = read_experts(f, num_experts=128, top_k=8)
        settings = {
            "windows": (window,) * layers,
            "num_experts": num_experts,
            "routing": Routing(top_k, normalise=f.flag("norm_topk_prob", False)),
            "expert_inner": f.integer("moe_intermediate_size", 1, MAX_WIDTH, 768),
            "sparse": read_sparse_layers(f, layers),
        }
        f.finish()
        return cls(**sizes, **settings, qkv_bias=bias, out_bias=bias, head_norm=True)


def read_sparse_layers(f: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers have experts: every `decoder_sparse_step`th, except those in `mlp_only_layers`."""
    period = f.integer("decoder_sparse_step", 1, MAX_LAYERS, 1)
    dense = f.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise ModelFileError(f"{f.where}: mlp_only_layers is {dense!r:.80}", "expected a list of layer numbers")
    return tuple(i not in dense and (i + 1) % period == 0 for i in range(layers))


class Qwen3Moe(Mixtral):
    """A Mixtral with head norms, under the tensor names of Qwen3."""

    Config = Qwen3MoeConfig

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Mixtral.names`, with Qwen3's names of the router and the experts."""
        mlp = "model.layers.*.mlp."
        return {
            **super().names(),
            "layers.*.mlp.router": mlp + "gate",
            **expert_names(mlp),
        }
