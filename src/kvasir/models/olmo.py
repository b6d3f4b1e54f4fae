"""OLMo (arXiv:2402.00838): a Llama with LayerNorms that have no weights; queries, keys and values may be clipped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.layers.norm import BareLayerNorm, RMSNorm
from kvasir.models.config import Fields
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama


@dataclass(frozen=True, slots=True)
class OlmoConfig(DecoderConfig):
    """The sizes and settings of an OLMo."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> OlmoConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**config, "layer_norm_eps": 1e-5})  # fixed in the model's code
        sizes, bias = read_sizes(f, eps="layer_norm_eps"), f.flag("attention_bias", False)
        clip = f.number("clip_qkv", 1e-6, 1e6, 0.0)
        f.finish()
        return cls(**sizes, windows=(0,) * sizes["num_layers"], qkv_bias=bias, out_bias=bias, qkv_clip=clip)


class Olmo(Llama):
    """A Llama with LayerNorms without weights."""

    Config = OlmoConfig
    Norm: ClassVar[type[RMSNorm]] = BareLayerNorm
