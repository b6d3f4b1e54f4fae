"""BitNet b1.58 (arXiv:2402.17764): a Llama with a norm before the last matrix of attention and of the MLP. Its matrices
are ternary (`kvasir.weights.published.bitnet`), and what they multiply is rounded to int8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvasir.layers.module import Entry
from kvasir.layers.sub_norm import NormedAttention, NormedMLP
from kvasir.models.llama import Llama, LlamaConfig

_DEFAULTS = {"rms_norm_eps": 1e-5, "hidden_act": "relu2", "rope_theta": 500000.0}


class BitNetConfig(LlamaConfig):
    """The sizes and settings of a BitNet."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        return super().from_hf({**_DEFAULTS, **config})


class BitNet(Llama):
    """A Llama with norms inside attention and MLPs."""

    Config = BitNetConfig

    def _mixer(self, layer: int, c: Any) -> NormedAttention:
        options = self._attention_options(layer, c)
        return NormedAttention(layer, c.width, c.heads, c.kv_heads, c.head_dim, c.norm_eps, **options)

    def _mlp(self, layer: int, c: Any) -> NormedMLP:
        return NormedMLP(c.width, c.inner, c.act, c.norm_eps)

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the inner norms."""
        return {
            **super().names(),
            "layers.*.attn.sub_norm": "model.layers.*.self_attn.attn_sub_norm",
            "layers.*.mlp.sub_norm": "model.layers.*.mlp.ffn_sub_norm",
        }
