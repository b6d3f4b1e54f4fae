"""ALBERT (arXiv:1909.11942): BERT whose layers share their weights, with narrower embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.layers.module import Entry
from kvasir.models.config import MAX_WIDTH, Fields
from kvasir.models.encoder import Encoder, EncoderConfig, read_encoder
from kvasir.models.pooling import HeadShape
from kvasir.types import Task

_DEFAULTS = {"hidden_size": 4096, "num_attention_heads": 64}


@dataclass(frozen=True, slots=True)
class AlbertConfig(EncoderConfig):
    """The sizes and settings of an ALBERT encoder."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> AlbertConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        f.expect("position_embedding_type", "absolute")
        f.expect("num_hidden_groups", 1)
        f.expect("inner_group_num", 1)
        for name in ("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks"):
            f.get(name)  # of the authors' code, without effect
        sizes = read_encoder(f, vocab_size=30000, inner=16384, act="gelu_new")
        found = cls(**sizes, embedding_width=f.integer("embedding_size", 1, MAX_WIDTH, 128))
        f.finish()
        return found


class Albert(Encoder):
    """A bidirectional encoder whose layers are equal. Each holds its own copy of the weights."""

    Config = AlbertConfig
    prefix: ClassVar[str] = "albert."
    ignored: ClassVar[tuple[str, ...]] = (
        r"(.*\.)?embeddings\.position_ids",
        r"(albert\.)?pooler\.(weight|bias)",
        r"(predictions|sop_classifier)\..*",
    )

    def classifier(self) -> HeadShape:
        """The classifier over the pooler's row, or over each token."""
        if self.config.pooling.task is Task.TOKEN_CLASSIFY:
            return HeadShape("classifier")
        return HeadShape("classifier", f"{self.prefix}pooler", "tanh")

    def names(self) -> Mapping[str, Entry]:
        """The name table: where each module's tensors are in a checkpoint, as in `Decoder.names`."""
        encoder, layer = "albert.encoder.", "albert.encoder.albert_layer_groups.0.albert_layers.0."
        return {
            "embed": "albert.embeddings.word_embeddings",
            "positions": "albert.embeddings.position_embeddings",
            "token_types": "albert.embeddings.token_type_embeddings",
            "norm": "albert.embeddings.LayerNorm",
            "widen": f"{encoder}embedding_hidden_mapping_in",
            "layers.*.attn.qkv.q": f"{layer}attention.query",
            "layers.*.attn.qkv.k": f"{layer}attention.key",
            "layers.*.attn.qkv.v": f"{layer}attention.value",
            "layers.*.attn.out": f"{layer}attention.dense",
            "layers.*.attn_norm": f"{layer}attention.LayerNorm",
            "layers.*.mlp.up": f"{layer}ffn",
            "layers.*.mlp.down": f"{layer}ffn_output",
            "layers.*.mlp_norm": f"{layer}full_layer_layer_norm",
            **self.pooler.names(),
        }
