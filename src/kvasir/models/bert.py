"""BERT as an embedding model (arXiv:1810.04805, pooled as in arXiv:1908.10084)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.layers.module import Entry
from kvasir.models.config import Fields
from kvasir.models.encoder import Encoder, EncoderConfig, read_encoder
from kvasir.models.pooling import HeadShape
from kvasir.types import Task


@dataclass(frozen=True, slots=True)
class BertConfig(EncoderConfig):
    """The sizes and settings of a BERT encoder."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> BertConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields(config)
        f.expect("position_embedding_type", "absolute")
        found = cls(**read_encoder(f, fewest_types=0))
        f.finish()
        return found


class Bert(Encoder):
    """A bidirectional encoder with learned positions."""

    Config = BertConfig
    prefix: ClassVar[str] = "bert."
    # Position ids stored by old checkpoints; the pooler; the masked-LM and next-sentence heads.
    ignored: ClassVar[tuple[str, ...]] = (
        r"(.*\.)?embeddings\.position_ids",
        r"(.*\.)?pooler\.dense\.(weight|bias)",
        r"cls\..*",
    )

    def classifier(self) -> HeadShape:
        """The classifier over the pooler's row, or over each token."""
        if self.config.pooling.task is Task.TOKEN_CLASSIFY:
            return HeadShape("classifier")
        return HeadShape("classifier", f"{self.prefix}pooler.dense", "tanh")

    def names(self) -> Mapping[str, Entry]:
        """The name table: where each module's tensors are in a checkpoint, as in `Decoder.names`."""
        prefix = self.prefix
        layer = f"{prefix}encoder.layer.*."
        return {
            "embed": f"{prefix}embeddings.word_embeddings",
            "positions": f"{prefix}embeddings.position_embeddings",
            "token_types": f"{prefix}embeddings.token_type_embeddings",
            "norm": f"{prefix}embeddings.LayerNorm",
            "layers.*.attn.qkv.q": f"{layer}attention.self.query",
            "layers.*.attn.qkv.k": f"{layer}attention.self.key",
            "layers.*.attn.qkv.v": f"{layer}attention.self.value",
            "layers.*.attn.out": f"{layer}attention.output.dense",
            "layers.*.attn_norm": f"{layer}attention.output.LayerNorm",
            "layers.*.mlp.up": f"{layer}intermediate.dense",
            "layers.*.mlp.down": f"{layer}output.dense",
            "layers.*.mlp_norm": f"{layer}output.LayerNorm",
            **self.pooler.names(),
        }
