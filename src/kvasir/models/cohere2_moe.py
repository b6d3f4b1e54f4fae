"""Cohere 2 with experts: a Cohere 2 whose first layers may be dense, and whose shared expert may be averaged with the
others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.errors import ModelFileError
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.module import Entry
from kvasir.layers.moe import MoE, Routing, SharedMoE
from kvasir.layers.norm import PlainLayerNorm, RMSNorm
from kvasir.models.config import MAX_EXPERTS, MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH, Fields, read_sliding_layers
from kvasir.models.decoder import read_sizes
from kvasir.models.mixtral import Mixtral, MixtralConfig, expert_names, read_experts
from kvasir.models.rope import halves

_DEFAULTS = {"layer_norm_eps": 1e-5, "tie_word_embeddings": True, "sliding_window": 4096, "logit_scale": 0.0625}


@dataclass(frozen=True, slots=True)
class Cohere2MoeConfig(MixtralConfig):
    """The sizes and settings of a Cohere 2 with experts. rms: whether its norms are RMSNorms. shared_scale: of the
    shared expert's output."""

    rms: bool = False
    shared_scale: float = 1.0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Cohere2MoeConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        rms = f.get("rms_norm_eps") is not None
        f.get("layer_norm_eps")
        sizes = read_sizes(f, head_dim=128, eps="rms_norm_eps" if rms else "layer_norm_eps")
        bias, window = f.flag("attention_bias", False), f.integer("sliding_window", 1, MAX_POSITIONS)
        layers, inner = sizes["num_layers"], sizes["inner"]
        first = f.integer("first_k_dense_replace", 0, MAX_LAYERS, 0)
        sparse = _read_sparse(f, layers, first)
        every = f.integer("prefix_dense_sliding_window_pattern", 1, MAX_LAYERS, 1)
        after = f.integer("sliding_window_pattern", 1, MAX_LAYERS, 4)
        slides = read_sliding_layers(f, layers) or _slides(layers, first, every, after)
        num_experts, top_k = read_experts(f, num_experts=8, top_k=2)
        scores = f.choice("expert_selection_fn", ("softmax", "sigmoid"), "softmax")
        normalise, shared = f.flag("norm_topk_prob", True), f.integer("num_shared_experts", 0, MAX_EXPERTS, 0)
        averages = f.choice("shared_expert_combination_strategy", ("average", "sum"), "average") == "average"
        share = 0.5 if shared and averages else 1.0
        dense = f.integer("prefix_dense_intermediate_size", 1, MAX_WIDTH, inner)
        scale = f.number("logit_scale", 1e-6, 1e6)
        f.finish()
        return cls(
            **{**sizes, "inner": dense},
            windows=tuple(window if sliding else 0 for sliding in slides),
            rotates=tuple(sliding or (every == 1 and not sparse[i]) for i, sliding in enumerate(slides)),
            qkv_bias=bias,
            out_bias=bias,
            logit_scale=scale,
            sparse=sparse,
            num_experts=num_experts,
            routing=Routing(top_k, scores, scores == "softmax" or normalise, scale=share),
            expert_inner=inner,
            shared_inner=shared * inner,
            rms=rms,
            shared_scale=share,
        )


def _read_sparse(f: Fields, layers: int, first: int) -> tuple[bool, ...]:
    kinds = f.get("mlp_layer_types")
    if kinds is None:
        return tuple(i >= first for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in ("dense", "sparse") for kind in kinds):
        raise ModelFileError(f"{f.where}: mlp_layer_types", f"expected a list of {layers} times dense or sparse")
    return tuple(kind == "sparse" for kind in kinds)


def _slides(layers: int, first: int, every: int, after: int) -> tuple[bool, ...]:
    dense = [(i + 1) % every != 0 for i in range(min(first, layers))]
    return *dense, *((i + 1) % after != 0 for i in range(layers - len(dense)))


class Cohere2Moe(Mixtral):
    """A Mixtral whose attention and experts read the same normalised rows."""

    Config = Cohere2MoeConfig
    config: Cohere2MoeConfig  # type: ignore[assignment]
    norms: ClassVar[tuple[str, ...]] = ("attn_norm",)
    parallel: ClassVar[bool] = True

    def _norm(self) -> RMSNorm:
        kind = RMSNorm if self.config.rms else PlainLayerNorm
        return kind(self.config.width, self.config.norm_eps)

    def _mlp(self, layer: int, c: Any) -> GatedMLP | MoE:
        if not c.sparse[layer] or not c.shared_inner:
            return super()._mlp(layer, c)
        sizes = c.width, c.expert_inner, c.num_experts, c.routing, c.shared_inner
        return SharedMoE(*sizes, gated=False, shared_scale=c.shared_scale, act=c.act)

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the rows of q and k in the order of our rotary embedding."""
        c, mlp = self.config, "model.layers.*.mlp."
        return {
            **super().names(),
            **halves("model.layers.*.self_attn.", c.head_dim, c.rotary_dim),
            **expert_names(mlp, "shared_experts"),
            "layers.*.mlp.router": mlp + "gate",
        }
