"""GLM-4.5 (arXiv:2508.06471) and dots1 (arXiv:2506.05767): first dense layers, then mixtures with a shared expert and
experts chosen by sigmoid scores (DeepSeek-V3, arXiv:2412.19437)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.errors import ModelFileError
from kvasir.layers.module import Entry
from kvasir.layers.moe import EXPERT_ACTIVATIONS, Routing
from kvasir.models.config import (
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_WIDTH,
    Fields,
    inner_object,
    read_sliding_layers,
)
from kvasir.models.decoder import read_sizes
from kvasir.models.drafting import Drafting, ignored_after, longer, numbered_after
from kvasir.models.mixtral import Mixtral, MixtralConfig, expert_names

_DEFAULTS = {"rms_norm_eps": 1e-5}


def read_deepseek_experts(
    f: Fields,
    layers: int,
    *,
    scores: str = "sigmoid",
    methods: tuple[str, ...] = ("noaux_tc",),
    best_of_group: int = 2,
    normalise: bool = True,
) -> dict[str, Any]:
    """The experts' settings in the fields of DeepSeek-V2 and V3, as keyword arguments of `MixtralConfig`. scores,
    best_of_group: of the `Routing`. methods: supported values of topk_method, the default first; "greedy" has no
    groups. normalise: the default of norm_topk_prob. Raises ModelFileError."""
    for training in ("output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "ep_size"):
        f.get(training)
    f.choice("hidden_act", EXPERT_ACTIVATIONS, "silu")
    f.expect("scoring_func", scores)
    is_grouped = f.choice("topk_method", methods, methods[0]) != "greedy"
    experts = f.integer("n_routed_experts", 1, MAX_EXPERTS)
    top_k = f.integer("num_experts_per_tok", 1, MAX_EXPERTS)
    groups, top_groups = f.integer("n_group", 1, MAX_EXPERTS, 1), f.integer("topk_group", 1, MAX_EXPERTS, 1)
    if not is_grouped:
        groups = top_groups = 1
    if experts % groups or top_groups > groups or top_k > top_groups * (experts // groups):
        raise ModelFileError(
            f"{f.where}: {top_k} of {experts} experts cannot be chosen from {top_groups} of {groups} groups"
        )
    routing = Routing(
        top_k,
        scores,
        normalise=f.flag("norm_topk_prob", normalise),
        scale=f.number("routed_scaling_factor", 1e-6, 1e6, 1.0),
        groups=groups,
        top_groups=top_groups,
        best_of_group=min(best_of_group, experts // groups),
    )
    inner, shared = f.integer("moe_intermediate_size", 1, MAX_WIDTH), f.integer("n_shared_experts", 0, MAX_EXPERTS, 0)
    dense = f.integer("first_k_dense_replace", 0, MAX_LAYERS, 0)
    if f.integer("moe_layer_freq", 1, MAX_LAYERS, 1) != 1:
        raise ModelFileError(f"{f.where}: moe_layer_freq is not 1", "every layer after the dense ones has experts")
    return {
        "num_experts": experts,
        "routing": routing,
        "expert_inner": inner,
        "shared_inner": shared * inner,
        "sparse": tuple(i >= dense for i in range(layers)),
    }


@dataclass(frozen=True, slots=True)
class Glm4MoeConfig(MixtralConfig):
    """The sizes and settings of a GLM-4.5. drafting: its layers for multi-token prediction."""

    drafting: int = 0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Glm4MoeConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        share = {} if _names_share(config) else {"partial_rotary_factor": 0.5}
        f = Fields({**_DEFAULTS, "n_shared_experts": 1, "first_k_dense_replace": 1, **share, **config})
        sizes, bias = read_sizes(f, partial=True), f.flag("attention_bias", False)
        head_norm, drafting = f.flag("use_qk_norm", False), f.integer("num_nextn_predict_layers", 0, MAX_LAYERS, 0)
        experts, layers = read_deepseek_experts(f, sizes["num_layers"]), sizes["num_layers"]
        f.finish()
        return cls(
            **sizes, **experts, windows=(0,) * layers, qkv_bias=bias, head_norm=head_norm, drafting=drafting
        )  # fmt: skip


def _names_share(config: Mapping[str, Any]) -> bool:
    return "partial_rotary_factor" in {**config, **inner_object(config, "rope_parameters")}


class Glm4Moe(Mixtral):
    """A Mixtral with a selection bias and a shared expert."""

    Config = Glm4MoeConfig
    selection = "e_score_correction_bias"

    @property
    def drafting(self) -> Drafting | None:
        """As `Decoder.drafting`. The layers, all with experts, are numbered after the decoder's own."""
        c = self.config
        count = getattr(c, "drafting", 0)
        return numbered_after(c.num_layers, longer(c, count, windows=0, sparse=True)) if count else None

    @property
    def ignored(self) -> tuple[str, ...]:
        """As `Decoder.ignored`, and the layers for multi-token prediction, which `MultiTokenHead` reads."""
        return (*super().ignored, *ignored_after(self.config.num_layers, getattr(self.config, "drafting", 0)))

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Mixtral.names`, with the names of the router and the experts."""
        mlp = "model.layers.*.mlp."
        return {
            **super().names(),
            **expert_names(mlp, "shared_experts"),
            "layers.*.mlp.router": mlp + "gate",
            "layers.*.mlp.selection": mlp + "gate",
        }


@dataclass(frozen=True, slots=True)
class Dots1Config(MixtralConfig):
    """The sizes and settings of a dots1."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Dots1Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({"norm_topk_prob": False, **config})
        sizes, bias = read_sizes(f), f.flag("attention_bias", False)
        layers = sizes["num_layers"]
        window = f.integer("sliding_window", 1, MAX_POSITIONS, 0 if "sliding_window" in config else 4096)
        first = f.integer("max_window_layers", 0, MAX_LAYERS, 62)
        slides = read_sliding_layers(f, layers) or tuple(i >= first for i in range(layers))
        experts = read_deepseek_experts(f, layers)
        f.finish()
        windows = tuple(window if sliding else 0 for sliding in slides)
        return cls(**sizes, **experts, windows=windows, qkv_bias=bias, out_bias=bias, head_norm=True)


class Dots1(Glm4Moe):
    """A GLM-4.5 with head norms, and windows in some layers."""

    Config = Dots1Config
