"""Hunyuan 3 (Hy3): normalised heads, a first dense layer, then mixtures with a shared expert and experts chosen by
sigmoid scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.errors import ModelFileError
from kvasir.layers.module import Entry
from kvasir.layers.moe import Routing
from kvasir.models.config import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH, Fields
from kvasir.models.decoder import read_sizes
from kvasir.models.glm4_moe import Glm4Moe, Glm4MoeConfig
from kvasir.models.glm4_moe_lite import read_sparse_layers
from kvasir.models.mixtral import read_experts

_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 11158840.0}


@dataclass(frozen=True, slots=True)
class HyV3Config(Glm4MoeConfig):
    """The sizes and settings of a Hunyuan 3."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> HyV3Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        sizes = read_sizes(f, kv_heads=8, head_dim=128)
        layers, bias = sizes["num_layers"], f.flag("attention_bias", False)
        f.expect("mlp_bias", False)
        _read_fixed(f)
        num_experts, top_k = read_experts(f, num_experts=192, top_k=8)
        inner, shared = f.integer("moe_intermediate_size", 1, MAX_WIDTH, 1536), _shared(f)
        scale = f.number("router_scaling_factor", 1e-6, 1e6, 2.826)
        dense = f.integer("first_k_dense_replace", 0, MAX_LAYERS, 1)
        sparse = read_sparse_layers(f, layers) or tuple(i >= dense for i in range(layers))
        drafting = f.integer("num_nextn_predict_layers", 0, MAX_LAYERS, 1)
        f.finish()
        return cls(
            **sizes,
            windows=(0,) * layers,
            num_experts=num_experts,
            routing=Routing(top_k, "sigmoid", scale=scale, epsilon=1e-20),
            expert_inner=inner,
            shared_inner=shared * inner,
            sparse=sparse,
            qkv_bias=bias,
            out_bias=bias,
            head_norm=True,
            drafting=drafting,
        )


def _read_fixed(f: Fields) -> None:
    """Fields of the published configs that have one supported value, or none that matters in float32."""
    f.get("enable_moe_fp32_combine")
    f.get("enable_attention_fp32_softmax")
    f.get("enable_lm_head_fp32")
    f.expect("qk_norm", True)
    f.expect("route_norm", True)
    f.expect("moe_router_enable_expert_bias", True)
    f.expect("moe_router_use_sigmoid", True)


def _shared(f: Fields) -> int:
    """The number of shared experts, which are one of their total width."""
    count = f.integer("num_shared_experts", 0, MAX_EXPERTS, 1)
    if not count:
        raise ModelFileError(f"{f.where}: num_shared_experts is 0", "expected at least one")
    return count


class HyV3(Glm4Moe):
    """A GLM-4.5 with head norms and its own names of the experts."""

    Config = HyV3Config
    selection = "expert_bias"

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Mixtral.names`, with the names of the router and the experts. The published checkpoints
        have others than those that transformers writes."""
        mlp = "model.layers.*.mlp."
        names = dict(super().names())
        for part in ("gate_up.gate", "gate_up.up", "down"):
            written = names[f"layers.*.mlp.shared.{part}"]
            assert isinstance(written, str)
            names[f"layers.*.mlp.shared.{part}"] = (written, written.replace("shared_experts", "shared_mlp"))
        return {
            **names,
            "layers.*.mlp.router": (mlp + "gate", mlp + "router.gate"),
            "layers.*.mlp.selection": "model.layers.*.mlp",
        }
