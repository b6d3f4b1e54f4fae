"""Helium (Kyutai): a Llama with rotary embeddings of neighbouring pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.layers.module import Entry
from kvasir.models.config import Fields
from kvasir.models.decoder import read_sizes
from kvasir.models.llama import Llama, LlamaConfig
from kvasir.models.rope import halves

_DEFAULTS = {"rms_norm_eps": 1e-8, "rope_theta": 10000.0}


@dataclass(frozen=True, slots=True)
class HeliumConfig(LlamaConfig):
    """The sizes and settings of a Helium."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> HeliumConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        sizes, bias = read_sizes(f, kv_heads=20, head_dim=128), f.flag("attention_bias", False)
        mlp_bias = f.flag("mlp_bias", False)
        f.finish()
        return cls(**sizes, windows=(0,) * sizes["num_layers"], qkv_bias=bias, mlp_bias=mlp_bias)


class Helium(Llama):
    """A Llama whose rows of q and k are reordered."""

    Config = HeliumConfig

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the rows of q and k in the order of our rotary embedding."""
        c = self.config
        return {**super().names(), **halves("model.layers.*.self_attn.", c.head_dim, c.rotary_dim)}
