"""Jina embeddings v2 (arXiv:2310.19923): BERT with gated MLPs, whose scores fall with the distance of two tokens, in
both directions, instead of positions. Its configs state the model type bert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.layers.module import Entry
from kvasir.layers.relative import Slopes
from kvasir.models.bert import Bert
from kvasir.models.config import Fields
from kvasir.models.encoder import EncoderConfig, fused, read_encoder

_ACTIVATIONS = {"geglu": "gelu", "reglu": "relu"}
_MOST_POSITIONS = 1 << 17  # of the table of distances


@dataclass(frozen=True, slots=True)
class JinaBertConfig(EncoderConfig):
    """separate_gate: whether the gate's matrix is a tensor of its own, as in old GGUF files."""

    separate_gate: bool = False

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> JinaBertConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields(config)
        f.choice("position_embedding_type", ("alibi",))
        f.integer("max_position_embeddings", 1, _MOST_POSITIONS)
        f.expect("hidden_act", "gelu")  # MLPs without gates have it
        act = _ACTIVATIONS[f.choice("feed_forward_type", tuple(_ACTIVATIONS))]
        for name in ("emb_pooler", "model_max_length"):
            f.get(name)  # sentence-transformers has its own
        separate = f.flag("separate_gate", False)
        sizes = read_encoder(f)
        f.finish()
        return cls(**{**sizes, "act": act}, learned_positions=False, gated=True, mlp_bias=False, separate_gate=separate)


class JinaBert(Bert):
    """A bidirectional encoder without positions."""

    Config = JinaBertConfig
    config: JinaBertConfig
    prefix: ClassVar[str] = "bert."

    def __init__(self, config: EncoderConfig):
        self.relative = Slopes(config.heads, config.max_position - 1)
        super().__init__(config)

    def _relative(self, layer: int) -> dict[str, Any]:
        return {"relative": self.relative}

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Bert.names`, with the gated MLP."""
        layer, c = f"{self.prefix}encoder.layer.*.mlp.", self.config
        table = {name: entry for name, entry in super().names().items() if not name.startswith("layers.*.mlp")}
        gate, up = (f"layers.*.mlp.gate_up.{part}" for part in ("gate", "up"))
        gates = {gate: f"{layer}gated_layers_w", up: f"{layer}gated_layers"}
        return {
            **table,
            **(gates if c.separate_gate else fused(f"{gate} {up}", f"{layer}gated_layers", c.inner)),
            "layers.*.mlp.down": f"{layer}wo",
            "layers.*.mlp_norm": f"{layer}layernorm",
        }
