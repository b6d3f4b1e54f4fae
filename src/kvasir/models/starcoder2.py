"""StarCoder2 (arXiv:2402.19173): LayerNorms, biases, MLPs without a gate, and a window in all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.layers.mlp import MLP
from kvasir.layers.module import Entry
from kvasir.layers.norm import LayerNorm, RMSNorm
from kvasir.models.config import MAX_POSITIONS, Fields
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama

_DEFAULTS = {"norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}


@dataclass(frozen=True, slots=True)
class Starcoder2Config(DecoderConfig):
    """The sizes and settings of a StarCoder2."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Starcoder2Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        sizes, bias = read_sizes(f, kv_heads=2, eps="norm_epsilon"), f.flag("use_bias", True)
        window = f.integer("sliding_window", 1, MAX_POSITIONS, 0)
        f.expect("norm_type", "layer_norm")
        f.expect("mlp_type", "default")
        f.finish()
        windows = (window,) * sizes["num_layers"]
        return cls(**sizes, windows=windows, qkv_bias=bias, out_bias=bias, mlp_bias=bias)


class Starcoder2(Llama):
    """A Llama with LayerNorms and MLPs that are not gated."""

    Config = Starcoder2Config
    Norm: ClassVar[type[RMSNorm]] = LayerNorm

    def _mlp(self, layer: int, c: Any) -> MLP:
        return MLP(c.width, c.inner, c.act, c.mlp_bias)

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the MLP's names."""
        mlp = "model.layers.*.mlp."
        return {**super().names(), "layers.*.mlp.up": mlp + "c_fc", "layers.*.mlp.down": mlp + "c_proj"}
