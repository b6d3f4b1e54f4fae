"""Seed-OSS: a Llama with biases for q, k and v, and its own bias flag for the output projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.models.config import Fields
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama


@dataclass(frozen=True, slots=True)
class SeedOssConfig(DecoderConfig):
    """The sizes and settings of a Seed-OSS."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> SeedOssConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields(config)
        sizes = read_sizes(f, kv_heads=8, head_dim=128)
        biases: dict[str, Any] = {
            "qkv_bias": f.flag("attention_bias", True),
            "out_bias": f.flag("attention_out_bias", False),
            "mlp_bias": f.flag("mlp_bias", False),
        }
        f.finish()
        return cls(**sizes, windows=(0,) * sizes["num_layers"], **biases)


class SeedOss(Llama):
    """A Llama with the biases of its config."""

    Config = SeedOssConfig
