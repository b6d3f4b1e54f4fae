"""DistilBERT (arXiv:1910.01108): a BERT of half as many layers, without token types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.layers.module import Entry
from kvasir.models.config import Fields
from kvasir.models.encoder import Encoder, EncoderConfig, read_encoder
from kvasir.models.pooling import HeadShape
from kvasir.types import Task

# Its names of BERT's fields.
_FIELDS = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "activation": "hidden_act",
}


@dataclass(frozen=True, slots=True)
class DistilBertConfig(EncoderConfig):
    """The sizes and settings of a DistilBERT encoder."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DistilBertConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({_FIELDS.get(name, name): value for name, value in config.items()})
        f.get("sinusoidal_pos_embds")  # how the stored table was made
        f.expect("layer_norm_eps", 1e-12)
        f.expect("type_vocab_size", None)
        found = cls(**{**read_encoder(f, num_layers=6), "token_types": 0})
        f.finish()
        return found


class DistilBert(Encoder):
    """A bidirectional encoder with learned positions."""

    Config = DistilBertConfig
    prefix: ClassVar[str] = "distilbert."
    ignored: ClassVar[tuple[str, ...]] = (r"(.*\.)?embeddings\.position_ids", r"vocab_\w+\.(weight|bias)")

    def classifier(self) -> HeadShape:
        """The classifier over the first row, or over each token."""
        if self.config.pooling.task is Task.TOKEN_CLASSIFY:
            return HeadShape("classifier")
        return HeadShape("classifier", "pre_classifier", "relu")

    def names(self) -> Mapping[str, Entry]:
        """The name table: where each module's tensors are in a checkpoint, as in `Decoder.names`."""
        layer = "distilbert.transformer.layer.*."
        return {
            "embed": "distilbert.embeddings.word_embeddings",
            "positions": "distilbert.embeddings.position_embeddings",
            "norm": "distilbert.embeddings.LayerNorm",
            "layers.*.attn.qkv.q": f"{layer}attention.q_lin",
            "layers.*.attn.qkv.k": f"{layer}attention.k_lin",
            "layers.*.attn.qkv.v": f"{layer}attention.v_lin",
            "layers.*.attn.out": f"{layer}attention.out_lin",
            "layers.*.attn_norm": f"{layer}sa_layer_norm",
            "layers.*.mlp.up": f"{layer}ffn.lin1",
            "layers.*.mlp.down": f"{layer}ffn.lin2",
            "layers.*.mlp_norm": f"{layer}output_layer_norm",
            **self.pooler.names(),
        }
