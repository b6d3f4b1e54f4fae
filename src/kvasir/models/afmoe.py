"""AFMoE (Arcee Trinity): four norms per block, gated heads, no rotation in the layers without a window, first dense
layers, then mixtures with shared experts and experts chosen by sigmoid scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.errors import ModelFileError
from kvasir.layers.attention import GatedAttention
from kvasir.layers.block import Mixer
from kvasir.layers.module import Entry
from kvasir.layers.moe import Routing
from kvasir.models.config import MAX_EXPERTS, MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH, Fields, read_sliding_layers
from kvasir.models.decoder import read_sizes
from kvasir.models.mixtral import Mixtral, MixtralConfig, expert_names, read_experts

_DEFAULTS = {"rms_norm_eps": 1e-5}


@dataclass(frozen=True, slots=True)
class AfmoeConfig(MixtralConfig):
    """The sizes and settings of an AFMoE."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> AfmoeConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        sizes = read_sizes(f, head_dim=128)
        layers = sizes["num_layers"]
        window = f.integer("sliding_window", 1, MAX_POSITIONS, 1024)
        every = f.integer("global_attn_every_n_layers", 1, MAX_LAYERS, 4)
        slides = read_sliding_layers(f, layers) or tuple((i + 1) % every != 0 for i in range(layers))
        num_experts, top_k = read_experts(f, num_experts=64, top_k=6)
        dense, inner = f.integer("num_dense_layers", 0, MAX_LAYERS, 1), f.integer("moe_intermediate_size", 1, MAX_WIDTH)
        _read_fixed(f)
        settings = {
            "shared_inner": inner * f.integer("num_shared_experts", 1, MAX_EXPERTS, 2),
            "routing": Routing(top_k, "sigmoid", scale=f.number("route_scale", 1e-6, 1e6, 1.0), epsilon=1e-20),
            "embed_scale": math.sqrt(sizes["width"]) if f.flag("mup_enabled", False) else 1.0,
        }
        f.finish()
        return cls(
            **sizes,
            **settings,
            windows=tuple(window if sliding else 0 for sliding in slides),
            rotates=tuple(slides),
            num_experts=num_experts,
            expert_inner=inner,
            sparse=tuple(i >= dense for i in range(layers)),
            head_norm=True,
        )


def _read_fixed(f: Fields) -> None:
    """The fields of the published configs that have one supported value. Raises ModelFileError for groups."""
    f.expect("score_func", "sigmoid")
    f.expect("route_norm", True)
    f.expect("attention_bias", False)
    f.expect("use_grouped_mm", True)
    f.get("load_balance_coeff")
    for groups in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
        if f.integer(groups, 1, MAX_EXPERTS, 1) != 1:
            raise ModelFileError(f"{f.where}: {groups} is {f.get(groups)}", "expected 1: experts without groups")


class Afmoe(Mixtral):
    """A Mixtral with gated attention and four norms."""

    Config = AfmoeConfig
    selection = "expert_bias"
    norms: ClassVar[tuple[str, ...]] = ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")

    def _mixer(self, layer: int, c: Any) -> Mixer:
        return GatedAttention(layer, c.width, c.heads, c.kv_heads, c.head_dim, **self._attention_options(layer, c))

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Mixtral.names`, with the names of the norms, the gates, the router and the experts."""
        layer, mlp = "model.layers.*.", "model.layers.*.mlp."
        return {
            **super().names(),
            **expert_names(mlp, "shared_experts"),
            "layers.*.attn.gate": layer + "self_attn.gate_proj",
            "layers.*.attn_post_norm": layer + "post_attention_layernorm",
            "layers.*.mlp_norm": layer + "pre_mlp_layernorm",
            "layers.*.mlp_post_norm": layer + "post_mlp_layernorm",
            "layers.*.mlp.router": mlp + "router.gate",
            "layers.*.mlp.selection": "model.layers.*.mlp",
        }
