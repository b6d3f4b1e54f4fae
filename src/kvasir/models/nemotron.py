"""Nemotron and Minitron (arXiv:2402.16819): LayerNorms whose weights are stored minus 1, MLPs with squared relu and
without a gate, and rotary embeddings in half of a head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.layers.norm import OffsetLayerNorm, RMSNorm
from kvasir.models.arcee import Arcee
from kvasir.models.config import Fields
from kvasir.models.decoder import DecoderConfig, read_sizes

_DEFAULTS = {"norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5}


@dataclass(frozen=True, slots=True)
class NemotronConfig(DecoderConfig):
    """The sizes and settings of a Nemotron."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> NemotronConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        sizes, bias = read_sizes(f, eps="norm_eps", partial=True), f.flag("attention_bias", False)
        mlp_bias = f.flag("mlp_bias", False)
        f.finish()
        windows = (0,) * sizes["num_layers"]
        return cls(**sizes, windows=windows, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)


class Nemotron(Arcee):
    """An Arcee with LayerNorms."""

    Config = NemotronConfig
    Norm: ClassVar[type[RMSNorm]] = OffsetLayerNorm
