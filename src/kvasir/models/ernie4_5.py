"""ERNIE 4.5, dense: a Llama whose rotary embedding turns neighbouring pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.layers.module import Take
from kvasir.models.config import Fields
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama
from kvasir.models.rope import halves

_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True}


@dataclass(frozen=True, slots=True)
class Ernie45Config(DecoderConfig):
    """The sizes and settings of an ERNIE 4.5."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Ernie45Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        sizes, bias = read_sizes(f, kv_heads=2, head_dim=128), f.flag("use_bias", False)
        f.finish()
        return cls(**sizes, windows=(0,) * sizes["num_layers"], qkv_bias=bias, out_bias=bias, mlp_bias=bias)


class Ernie45(Llama):
    """A Llama with the biases of its config."""

    Config = Ernie45Config

    def names(self) -> Mapping[str, str | Take | tuple[str, ...]]:
        """The name table of `Decoder.names`, with the rows of q and k in the order of our rotary embedding."""
        c = self.config
        return {**super().names(), **halves("model.layers.*.self_attn.", c.head_dim, c.rotary_dim)}
