"""Qwen3, dense (arXiv:2505.09388): Llama whose q and k are normalised per head; windows on some layers if
asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.models.config import Fields, read_layer_windows
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama


@dataclass(frozen=True, slots=True)
class Qwen3Config(DecoderConfig):
    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen3Config:
        f = Fields(config)
        sizes = read_sizes(f, kv_heads=32, head_dim=128)
        windows = read_layer_windows(f, sizes["num_layers"])
        bias = f.flag("attention_bias", False)
        f.finish()
        return cls(**sizes, windows=windows, qkv_bias=bias, out_bias=bias, head_norm=True)


class Qwen3(Llama):
    Config = Qwen3Config
