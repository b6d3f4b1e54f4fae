"""Decoders that are a Llama with one or two other settings: IQuest-Coder, the Code World Model (arXiv:2510.02387), and
Jais 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kvasir.layers.norm import LayerNorm, RMSNorm
from kvasir.models.arcee import Arcee
from kvasir.models.config import MAX_POSITIONS, Fields, read_sliding_layers
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama, LlamaConfig


class IQuestCoderConfig(LlamaConfig):
    """The sizes and settings of an IQuest-Coder."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields(config)
        f.expect("clip_qkv", None)
        f.expect("use_sliding_window", False)
        unused = ("clip_qkv", "use_sliding_window", "sliding_window", "max_window_layers")
        own = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128}
        return super().from_hf({**own, **{name: value for name, value in config.items() if name not in unused}})


class IQuestCoder(Llama):
    """A Llama."""

    Config = IQuestCoderConfig


class CwmConfig(DecoderConfig):
    """The sizes and settings of a Code World Model."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> CwmConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({"rms_norm_eps": 1e-5, "rope_theta": 1e6, **config})
        sizes = read_sizes(f, kv_heads=8, head_dim=128)
        layers, mlp_bias = sizes["num_layers"], f.flag("mlp_bias", False)
        f.expect("attention_bias", False)
        window = f.integer("sliding_window", 1, MAX_POSITIONS, 8192)
        slides = read_sliding_layers(f, layers) or tuple(i % 4 != 0 for i in range(layers))
        f.finish()
        return cls(**sizes, windows=tuple(window if sliding else 0 for sliding in slides), mlp_bias=mlp_bias)


class Cwm(Llama):
    """A Llama with windows in most layers."""

    Config = CwmConfig


class Jais2Config(DecoderConfig):
    """The sizes and settings of a Jais 2."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Jais2Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({"layer_norm_eps": 1e-5, "hidden_act": "relu2", **config})
        sizes = read_sizes(f, eps="layer_norm_eps")
        bias, mlp_bias = f.flag("attention_bias", True), f.flag("mlp_bias", True)
        f.finish()
        windows = (0,) * sizes["num_layers"]
        return cls(**sizes, windows=windows, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)


class Jais2(Arcee):
    """An Arcee with LayerNorms."""

    Config = Jais2Config
    Norm: ClassVar[type[RMSNorm]] = LayerNorm
