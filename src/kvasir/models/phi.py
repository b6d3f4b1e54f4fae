"""Phi 1, 1.5 and 2 (arXiv:2306.11644, arXiv:2309.05463): LayerNorms, biases on every linear layer, attention and MLP in
parallel after one norm, and rotary embeddings in a part of a head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.layers.mlp import MLP
from kvasir.layers.module import Entry
from kvasir.layers.norm import LayerNorm, RMSNorm
from kvasir.models.config import Fields
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama

_DEFAULTS = {"layer_norm_eps": 1e-5, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5}


@dataclass(frozen=True, slots=True)
class PhiConfig(DecoderConfig):
    """The sizes and settings of a Phi."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> PhiConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        sizes, head_norm = read_sizes(f, eps="layer_norm_eps", partial=True), f.flag("qk_layernorm", False)
        f.finish()
        biases = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias", "head_bias"), True)
        return cls(**sizes, **biases, windows=(0,) * sizes["num_layers"], head_norm=head_norm)


class Phi(Llama):
    """A Llama with LayerNorms, MLPs that are not gated, and blocks in parallel."""

    Config = PhiConfig
    Norm: ClassVar[type[RMSNorm]] = LayerNorm
    norms: ClassVar[tuple[str, ...]] = ("attn_norm",)
    parallel: ClassVar[bool] = True

    def _mlp(self, layer: int, c: Any) -> MLP:
        return MLP(c.width, c.inner, c.act, c.mlp_bias)

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the names of this family."""
        layer = "model.layers.*."
        return {
            **super().names(),
            "norm": "model.final_layernorm",
            "layers.*.attn.q_norm": layer + "self_attn.q_layernorm",
            "layers.*.attn.k_norm": layer + "self_attn.k_layernorm",
            "layers.*.attn.out": layer + "self_attn.dense",
            "layers.*.mlp.up": layer + "mlp.fc1",
            "layers.*.mlp.down": layer + "mlp.fc2",
        }
