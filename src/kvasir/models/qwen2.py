"""Qwen 1.5, 2 and 2.5 (arXiv:2407.10671): Llama with biases on q, k and v, and windows on some layers if
asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.models.config import Fields, read_layer_windows
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama


@dataclass(frozen=True, slots=True)
class Qwen2Config(DecoderConfig):
    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen2Config:
        f = Fields(config)
        sizes = read_sizes(f, kv_heads=32)
        windows = read_layer_windows(f, sizes["num_layers"])
        f.finish()
        return cls(**sizes, windows=windows, qkv_bias=True)


class Qwen2(Llama):
    Config = Qwen2Config
