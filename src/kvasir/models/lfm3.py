"""LFM3: LFM2 with norms before and after its parts, a sliding window with a rotary embedding of its own in half of the
attention layers, and a gate for each head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.attention import HeadGatedAttention
from kvasir.layers.block import DecoderLayer, Mixer
from kvasir.layers.module import Entry
from kvasir.layers.rope import Rope, RopeScaling
from kvasir.models.config import MAX_LAYERS, MAX_POSITIONS, Fields, inner_object
from kvasir.models.decoder import read_sizes
from kvasir.models.gemma3_text import split_rope
from kvasir.models.gemma4_config import read_full_rope
from kvasir.models.lfm2 import Lfm2, Lfm2Config, lfm2_fields, read_convolutions
from kvasir.models.rope import read_rope

_DEFAULTS = {"intermediate_size": 7680, "num_key_value_heads": 4, "head_dim": 128, "conv_L_cache": 7}
_LOCAL = {"rope_type": "default", "rope_theta": 1e4}
_FULL = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
_KINDS = ("conv", "full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class Lfm3Config(Lfm2Config):
    """The sizes and settings of an LFM3.

    sandwich: whether the outputs of a layer's parts are normalised. gated: whether heads have gates. local_theta,
    local_scaling: the rotary embedding of the layers with a window.
    """

    sandwich: bool = True
    gated: bool = True
    local_theta: float = 1e4
    local_scaling: RopeScaling = field(default_factory=RopeScaling)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Lfm3Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        full, local = split_rope(config)
        f = lfm2_fields({**full, "rope_parameters": None}, **_DEFAULTS)
        f.expect("hidden_act", "silu")
        sizes, bias = read_sizes(f, eps="norm_eps"), f.flag("attention_bias", False)
        layers, most = sizes["num_layers"], sizes["max_position"]
        kinds, window = _kinds(f, layers), f.integer("sliding_window", 1, MAX_POSITIONS, 256)
        plain = ["conv" if kind == "conv" else "full_attention" for kind in kinds]
        settings = read_convolutions(replace_values(f, layer_types=plain), layers)
        theta, scaling = read_full_rope(inner_object(full, "rope_parameters") or _FULL, most)
        of_windows = Fields({"rope_parameters": inner_object(local, "rope_parameters") or _LOCAL})
        local_theta, local_scaling = read_rope(of_windows, most)
        sandwich, gated = f.flag("use_sandwich_norm", True), f.flag("use_attention_gate", True)
        f.finish()
        return cls(
            **sizes | {"rope_theta": theta, "rope_scaling": scaling},
            **settings, **{"sparse": (False,) * layers, "num_experts": 1, "expert_inner": 1},  # there are none
            windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds), head_norm=True,
            qkv_bias=bias, out_bias=bias, sandwich=sandwich, gated=gated, local_theta=local_theta,
            local_scaling=local_scaling,
        )  # fmt: skip


def replace_values(f: Fields, **values: Any) -> Fields:
    """The fields with other values; what is read of them counts as read of `f`."""
    return replace(f, values={**f.values, **values})


def _kinds(f: Fields, layers: int) -> list[str]:
    """The kind of each layer. By default every fourth has full attention, and every fourth a window."""
    kinds = f.get("layer_types")
    if kinds is None:
        every = ("sliding_attention", "conv", "full_attention", "conv")
        return ["conv", *(every[i % 4] for i in range(1, layers))]
    if not isinstance(kinds, list) or len(kinds) != layers or layers > MAX_LAYERS:
        raise ModelFileError(f"{f.where}: layer_types is {kinds!r:.80}", f"expected a list of {layers} names")
    for kind in kinds:
        if kind not in _KINDS:
            raise UnsupportedModel(f"{f.where}: layer_types names {kind!r:.80}", f"supported: {', '.join(_KINDS)}")
    return kinds


class Lfm3(Lfm2):
    """An LFM2 with the norms, windows and gates of its config."""

    Config = Lfm3Config
    config: Lfm3Config

    def __init__(self, config: Lfm3Config):
        self.local_rope = Rope(config.rotary_dim, config.local_theta, config.local_scaling)
        super().__init__(config)

    def _rope_of(self, layer: int) -> Rope | None:
        return self.local_rope if self.config.windows[layer] else self.rope

    def _block(self, layer: int, c: Any) -> DecoderLayer:
        block = super()._block(layer, c)
        if c.sandwich:
            block.attn_post_norm, block.mlp_post_norm = self._norm(), self._norm()
        return block

    def _mixer(self, layer: int, c: Any) -> Mixer:
        if c.convolves[layer] or not c.gated:
            return super()._mixer(layer, c)
        sizes = layer, c.width, c.heads, c.kv_heads, c.head_dim
        return HeadGatedAttention(*sizes, **self._attention_options(layer, c))

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Lfm2.names`, with the gates, and the norms after the parts."""
        layer = "model.layers.*."
        return {
            **super().names(),
            "layers.*.attn_post_norm": layer + "post_operator_norm",
            "layers.*.mlp_post_norm": layer + "post_ffn_norm",
            "layers.*.attn.q_norm": layer + "self_attn.q_norm",
            "layers.*.attn.k_norm": layer + "self_attn.k_norm",
            "layers.*.attn.gate": (layer + "self_attn.gate_proj", layer + "self_attn.g_proj"),
            "layers.*.attn.out": (layer + "self_attn.o_proj", layer + "conv.out_proj"),
        }
