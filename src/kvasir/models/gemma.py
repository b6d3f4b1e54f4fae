"""Gemma (arXiv:2403.08295): a Llama with norms whose weights are stored minus 1, and scaled embeddings; VaultGemma."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.layers.module import Entry
from kvasir.models.config import Fields
from kvasir.models.decoder import Decoder, read_sizes
from kvasir.models.gemma2 import Gemma2, Gemma2Config

_DEFAULTS = {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}


@dataclass(frozen=True, slots=True)
class GemmaConfig(Gemma2Config):
    """The sizes and settings of a Gemma."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> GemmaConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        given = {**_DEFAULTS, **config}
        if given["hidden_act"] == "gelu":  # the tanh approximation is meant
            given["hidden_act"] = "gelu_pytorch_tanh"
        f = Fields(given)
        sizes, bias = read_sizes(f, head_dim=256), f.flag("attention_bias", False)
        f.get("hidden_activation")  # transformers does not read it
        f.expect("use_bidirectional_attention", False)
        f.finish()
        return cls(**sizes, windows=(0,) * sizes["num_layers"], qkv_bias=bias, out_bias=bias)


class Gemma(Gemma2):
    """A Gemma 2 with two norms per block and without soft caps."""

    Config = GemmaConfig
    norms: ClassVar[tuple[str, ...]] = ("attn_norm", "mlp_norm")

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`."""
        return Decoder.names(self)


class VaultGemma(Gemma2):
    """A Gemma 2 without norms after attention and the MLP (arXiv:2510.15001)."""

    norms: ClassVar[tuple[str, ...]] = ("attn_norm", "mlp_norm")
