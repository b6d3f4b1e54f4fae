"""Phi-3.5 MoE (arXiv:2404.14219): a Mixtral with LayerNorms and biases, whose tokens choose two experts by SparseMixer
(arXiv:2310.00811), and LongRoPE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.errors import UnsupportedModel
from kvasir.layers.moe import Routing
from kvasir.layers.norm import LayerNorm, RMSNorm
from kvasir.models.config import MAX_POSITIONS, Fields
from kvasir.models.decoder import read_sizes
from kvasir.models.mixtral import Mixtral, MixtralConfig, read_experts

_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 1e6}


@dataclass(frozen=True, slots=True)
class PhimoeConfig(MixtralConfig):
    """The sizes and settings of a Phi-3.5 MoE."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> PhimoeConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        sizes, bias, head_bias = read_sizes(f), f.flag("attention_bias", False), f.flag("lm_head_bias", False)
        layers, window = sizes["num_layers"], f.integer("sliding_window", 1, MAX_POSITIONS, 0)
        closeness = f.number("router_jitter_noise", 0.0, 1e3, 0.01)
        num_experts, top_k = read_experts(f, num_experts=16, top_k=2)
        if top_k != 2 or num_experts < 2:
            raise UnsupportedModel(f"{f.where}: {top_k} of {num_experts} experts for each token",
                                   "this model chooses 2 of at least 2")  # fmt: skip
        f.get("input_jitter_noise")  # in training
        f.finish()
        return cls(
            **sizes,
            windows=(window if window < sizes["max_position"] else 0,) * layers,
            sparse=(True,) * layers,
            num_experts=num_experts,
            routing=Routing(2, "sparsemixer", epsilon=closeness),
            expert_inner=sizes["inner"],
            qkv_bias=bias,
            out_bias=bias,
            head_bias=head_bias,
        )


class Phimoe(Mixtral):
    """A Mixtral with LayerNorms."""

    Config = PhimoeConfig
    Norm: ClassVar[type[RMSNorm]] = LayerNorm
