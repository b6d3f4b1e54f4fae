"""OLMo 2 and 3 (arXiv:2501.00656): norms after attention and the MLP only, and over all heads of q and k together.

In OLMo 3, three of four layers have a sliding window, and a scaling of the rotary embedding is for the other layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.layers.module import Entry
from kvasir.layers.rope import Rope
from kvasir.models.config import MAX_POSITIONS, Fields, inner_object, read_sliding_layers
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.gemma3_text import split_rope
from kvasir.models.llama import Llama

_DEFAULTS = {"rms_norm_eps": 1e-5}


@dataclass(frozen=True, slots=True)
class Olmo2Config(DecoderConfig):
    """The sizes and settings of an OLMo 2 or 3. window_theta: of the layers with a window."""

    window_theta: float = 0.0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Olmo2Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        sizes, bias = read_sizes(f), f.flag("attention_bias", False)
        f.finish()
        windows = (0,) * sizes["num_layers"]
        return cls(**sizes, windows=windows, qkv_bias=bias, out_bias=bias, head_norm=True)


class Olmo3Config(Olmo2Config):
    """The sizes and settings of an OLMo 3."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Olmo2Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        full, local = split_rope(config)
        f = Fields({**_DEFAULTS, "rope_theta": 500000.0, "sliding_window": 4096, **full})
        sizes, bias = read_sizes(f), f.flag("attention_bias", False)
        layers, window = sizes["num_layers"], f.integer("sliding_window", 1, MAX_POSITIONS)
        slides = read_sliding_layers(f, layers) or [(i + 1) % 4 != 0 for i in range(layers)]
        inner = Fields({"rope_type": "default", **inner_object(local, "rope_parameters")})
        inner.expect("rope_type", "default")
        f.finish()
        return cls(
            **sizes,
            windows=tuple(window if sliding else 0 for sliding in slides),
            qkv_bias=bias,
            out_bias=bias,
            head_norm=True,
            window_theta=inner.number("rope_theta", 1.0, 1e12, sizes["rope_theta"]),
        )


class Olmo2(Llama):
    """A Llama that normalises what attention and the MLP add, not what they read."""

    Config = Olmo2Config
    norms: ClassVar[tuple[str, ...]] = ("attn_post_norm", "mlp_post_norm")

    def _attention_options(self, layer: int, c: Any) -> dict[str, Any]:
        return {**super()._attention_options(layer, c), "whole_norm": True}

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the norms after attention and the MLP."""
        return {**super().names(), **POST_NORMS}


POST_NORMS = {
    "layers.*.attn_post_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp_post_norm": "model.layers.*.post_feedforward_layernorm",
}


class Olmo3(Olmo2):
    """An OLMo 2 with a second rotary embedding for the layers with a window."""

    Config = Olmo3Config
    config: Olmo2Config

    def __init__(self, config: Olmo2Config):
        self.window_rope = Rope(config.rotary_dim, config.window_theta)
        super().__init__(config)

    def _rope_of(self, layer: int) -> Rope | None:
        return self.window_rope if self.config.windows[layer] else self.rope
