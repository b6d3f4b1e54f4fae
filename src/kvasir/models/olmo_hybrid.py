"""OLMo Hybrid: OLMo 3 whose recurrent layers are Gated DeltaNets (arXiv:2412.06464) that may flip what they remember
(arXiv:2411.12537), with norms before instead of after them; published models have no rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvasir.layers.block import DecoderLayer, Mixer
from kvasir.layers.gated_delta import GatedDelta, Heads
from kvasir.layers.module import Entry, Take
from kvasir.models.config import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields
from kvasir.models.decoder import read_sizes
from kvasir.models.olmo2 import Olmo2, Olmo2Config
from kvasir.models.qwen3_next import read_delta

_NORM_EPS = 1e-5  # of a Gated DeltaNet's output, whatever the config sets


@dataclass(frozen=True, slots=True)
class OlmoHybridConfig(Olmo2Config):
    """The sizes and settings of an OLMo Hybrid.

    recurrent: per layer, whether it is a Gated DeltaNet. delta: the heads of a Gated DeltaNet. taps: the length of its
    convolution, in tokens. strength: the greatest write strength.
    """

    recurrent: tuple[bool, ...] = ()
    delta: Heads = field(kw_only=True)
    taps: int = 0
    strength: float = 1.0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> OlmoHybridConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields(config)
        rotates = _rotates(f)
        if not rotates:
            f.values = {**f.values, "rope_parameters": None}
        layers, heads = f.integer("num_hidden_layers", 1, MAX_LAYERS), f.integer("num_attention_heads", 1, MAX_HEADS)
        f.values = {**_delta_defaults(f, layers, heads), **{k: v for k, v in f.values.items() if v is not None}}
        sizes, bias = read_sizes(f), f.flag("attention_bias", False)
        delta = read_delta(f, layers)
        strength = 2.0 if f.flag("linear_allow_neg_eigval", True) else 1.0
        f.finish()
        return cls(
            **sizes, **delta, strength=strength, windows=(0,) * layers, qkv_bias=bias, out_bias=bias, head_norm=True,
            rotates=(rotates,) * layers,
        )  # fmt: skip


def _rotates(f: Fields) -> bool:
    """Whether attention has a rotary embedding. null stands for none, as the authors' converter writes it."""
    values = f.values
    if "rope_parameters" not in values:
        return "rope_theta" not in values or values["rope_theta"] is not None
    rope = values["rope_parameters"]
    return rope is not None and not (isinstance(rope, Mapping) and "rope_theta" in rope and rope["rope_theta"] is None)


def _delta_defaults(f: Fields, layers: int, heads: int) -> dict[str, Any]:
    """What absent fields of the recurrent layers derive from others."""
    keys = f.integer("linear_num_key_heads", 1, MAX_HEADS, heads)
    dim = f.integer(
        "linear_key_head_dim", 1, MAX_WIDTH, max(1, 3 * f.integer("hidden_size", 1, MAX_WIDTH) // 4 // keys)
    )
    kinds = ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)]
    return {
        "layer_types": kinds if "full_attention" in kinds else [*kinds[:-1], "full_attention"],
        "linear_num_key_heads": keys,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": dim,
        "linear_value_head_dim": 2 * dim,
    }


class OlmoHybrid(Olmo2):
    """An OLMo 2 with recurrent layers, which have their norms where a Llama has them."""

    Config = OlmoHybridConfig
    config: OlmoHybridConfig

    def _block(self, layer: int, c: Any) -> DecoderLayer:
        if not c.recurrent[layer]:
            return super()._block(layer, c)
        return DecoderLayer(self._norm(), self._mixer(layer, c), self._norm(), self._mlp(layer, c))

    def _mixer(self, layer: int, c: Any) -> Mixer:
        if not c.recurrent[layer]:
            return super()._mixer(layer, c)
        return GatedDelta(layer, c.width, c.delta, c.taps, _NORM_EPS, c.act, strength=c.strength, apart=True)

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Olmo2.names`, with the recurrent layers."""
        layer, heads = "model.layers.*.", self.config.delta
        delta, wide = layer + "linear_attn.", heads.qk * heads.dim
        runs = {"q": (0, wide), "k": (wide, 2 * wide), "v": (2 * wide, heads.channels)}
        after = (layer + "feedforward_layer_norm", layer + "post_attention_layernorm")
        return {
            **super().names(),
            "layers.*.attn_norm": (layer + "attention_layer_norm", layer + "input_layernorm"),
            "layers.*.mlp_norm": after,
            "layers.*.attn_post_norm": after,  # transformers saves it under both names
            **{f"layers.*.attn.inputs.{part}": f"{delta}{part}_proj" for part in "qkv"},
            "layers.*.attn.inputs.z": delta + "g_proj",
            "layers.*.attn.gates.b": delta + "b_proj",
            "layers.*.attn.gates.a": delta + "a_proj",
            **{
                f"layers.*.attn.conv.{part}": (f"{delta}{part}_conv1d", Take(delta + "conv1d", run))
                for part, run in runs.items()
            },
            "layers.*.attn": layer + "linear_attn",
            "layers.*.attn.norm": delta + "o_norm",
            "layers.*.attn.out": (layer + "self_attn.o_proj", delta + "o_proj"),
        }
