"""Qwen 1.5, 2 and 2.5 (arXiv:2407.10671): Llama with biases on q, k and v, and optional sliding windows on some
layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.models.config import Fields, read_layer_windows
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama


@dataclass(frozen=True, slots=True)
class Qwen2Config(DecoderConfig):
    """The sizes and settings of a Qwen2."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen2Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields(config)
        sizes = read_sizes(f, kv_heads=32, both_ways=True)
        windows = read_layer_windows(f, sizes["num_layers"])
        f.finish()
        return cls(**sizes, windows=windows, qkv_bias=True)


class Qwen2(Llama):
    """A Llama with the biases and windows of its config."""

    Config = Qwen2Config
