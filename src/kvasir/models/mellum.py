"""Mellum 2: a Qwen3 with experts, windows in some layers, and a rotary embedding of their own for these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.layers.moe import Routing
from kvasir.layers.rope import Rope
from kvasir.models.config import MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH, Fields, inner_object, read_sliding_layers
from kvasir.models.decoder import read_sizes
from kvasir.models.gemma3_text import split_rope
from kvasir.models.glm4_moe_lite import read_sparse_layers
from kvasir.models.mixtral import read_experts
from kvasir.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig


@dataclass(frozen=True, slots=True)
class MellumConfig(Qwen3MoeConfig):
    """The sizes and settings of a Mellum 2. window_theta: of the layers with a window."""

    window_theta: float = 0.0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> MellumConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        full, local = split_rope(config)
        f = Fields({"rope_theta": 500000.0, "sliding_window": 1024, **full})
        sizes, bias = read_sizes(f, kv_heads=4, head_dim=128), f.flag("attention_bias", False)
        layers, window = sizes["num_layers"], f.integer("sliding_window", 1, MAX_POSITIONS)
        slides = read_sliding_layers(f, layers) or (False,) * layers
        num_experts, top_k = read_experts(f, num_experts=64, top_k=8)
        for drafting in ("num_nextn_predict_layers", "num_mtp_layers"):
            f.integer(drafting, 0, MAX_LAYERS, 0)
        for drafting in ("mtp_layer_types", "mtp_mlp_layer_types"):
            f.get(drafting)
        normalise, inner = f.flag("norm_topk_prob", True), f.integer("moe_intermediate_size", 1, MAX_WIDTH, 896)
        inner_rope = Fields({"rope_type": "default", **inner_object(local, "rope_parameters")})
        inner_rope.expect("rope_type", "default")
        sparse = read_sparse_layers(f, layers) or (True,) * layers
        f.finish()
        return cls(
            **sizes,
            windows=tuple(window if sliding else 0 for sliding in slides),
            num_experts=num_experts,
            routing=Routing(top_k, normalise=normalise),
            expert_inner=inner,
            sparse=sparse,
            qkv_bias=bias,
            out_bias=bias,
            head_norm=True,
            window_theta=inner_rope.number("rope_theta", 1.0, 1e12, 10000.0),
        )


class Mellum(Qwen3Moe):
    """A Qwen3 with experts and a second rotary embedding."""

    Config = MellumConfig
    config: MellumConfig

    def __init__(self, config: MellumConfig):
        self.window_rope = Rope(config.rotary_dim, config.window_theta)
        super().__init__(config)

    @property
    def ignored(self) -> tuple[str, ...]:
        """As `Decoder.ignored`, and the modules for multi-token prediction."""
        return (*super().ignored, r"mtp\..*")

    def _rope_of(self, layer: int) -> Rope | None:
        return self.window_rope if self.config.windows[layer] else self.rope
