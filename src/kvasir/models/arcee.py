"""Arcee (AFM-4.5B): a Llama whose MLP has no gate, with squared relu."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvasir.layers.mlp import MLP
from kvasir.layers.module import Entry
from kvasir.models.llama import Llama, LlamaConfig

_DEFAULTS = {"rms_norm_eps": 1e-5, "hidden_act": "relu2"}


class ArceeConfig(LlamaConfig):
    """The sizes and settings of an Arcee."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        return super().from_hf({**_DEFAULTS, **config})


class Arcee(Llama):
    """A Llama with MLPs that are not gated."""

    Config = ArceeConfig

    def _mlp(self, layer: int, c: Any) -> MLP:
        return MLP(c.width, c.inner, c.act, c.mlp_bias)

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the MLP's first matrix."""
        return {**super().names(), "layers.*.mlp.up": "model.layers.*.mlp.up_proj"}
