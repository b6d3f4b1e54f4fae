"""InternLM 3 (arXiv:2403.17297): a Llama whose config names the biases in its own way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.models.config import Fields
from kvasir.models.decoder import read_sizes
from kvasir.models.llama import Llama, LlamaConfig

_DEFAULTS = {"rms_norm_eps": 1e-5}
_NAMES = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}


@dataclass(frozen=True, slots=True)
class InternLM3Config(LlamaConfig):
    """The sizes and settings of an InternLM 3."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> InternLM3Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **{_NAMES.get(name, name): value for name, value in config.items()}})
        sizes = read_sizes(f, kv_heads=2, head_dim=128)
        bias, mlp_bias = f.flag("attention_bias", False), f.flag("mlp_bias", False)
        f.finish()
        return cls(**sizes, windows=(0,) * sizes["num_layers"], qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)


class InternLM3(Llama):
    """A Llama with the biases of its config."""

    Config = InternLM3Config
