"""Granite (arXiv:2405.04324): a Llama with multipliers of the embeddings, the scores, the residuals and the logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.models.config import Fields
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama


@dataclass(frozen=True, slots=True)
class GraniteConfig(DecoderConfig):
    """The sizes and settings of a Granite."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> GraniteConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields(config)
        sizes, bias = read_sizes(f), f.flag("attention_bias", False)
        settings = {**read_multipliers(f), "mlp_bias": f.flag("mlp_bias", False)}
        f.finish()
        return cls(**sizes, **settings, windows=(0,) * sizes["num_layers"], qkv_bias=bias, out_bias=bias)


def read_multipliers(f: Fields) -> dict[str, float]:
    """Granite's multipliers, as keyword arguments of `DecoderConfig`."""
    return {
        "embed_scale": f.number("embedding_multiplier", 1e-6, 1e6, 1.0),
        "attn_scale": f.number("attention_multiplier", 1e-6, 1e6, 1.0),
        "residual_scale": f.number("residual_multiplier", 1e-6, 1e6, 1.0),
        "logit_scale": 1.0 / f.number("logits_scaling", 1e-6, 1e6, 1.0),
    }


class Granite(Llama):
    """A Llama with the multipliers of its config."""

    Config = GraniteConfig
