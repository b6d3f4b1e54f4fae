"""ELECTRA (arXiv:2003.10555), its discriminator: BERT's encoder with another classifier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.layers.module import Entry
from kvasir.models.bert import Bert
from kvasir.models.config import MAX_WIDTH, Fields
from kvasir.models.encoder import EncoderConfig, read_encoder
from kvasir.models.pooling import HeadShape
from kvasir.types import Task


@dataclass(frozen=True, slots=True)
class ElectraConfig(EncoderConfig):
    """The sizes and settings of an ELECTRA encoder."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ElectraConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({"hidden_size": 256, "num_attention_heads": 4, "embedding_size": 128, **config})
        f.expect("position_embedding_type", "absolute")
        for name in ("summary_activation", "summary_use_proj"):
            f.get(name)  # of heads that are not implemented
        sizes = read_encoder(f, inner=1024)
        embeddings = f.integer("embedding_size", 1, MAX_WIDTH)
        f.finish()
        return cls(**sizes, embedding_width=0 if embeddings == sizes["width"] else embeddings)


class Electra(Bert):
    """A bidirectional encoder. The embeddings of small ones are narrower than the model."""

    Config = ElectraConfig
    prefix: ClassVar[str] = "electra."
    ignored: ClassVar[tuple[str, ...]] = (*Bert.ignored, r"(discriminator|generator)_\w+\..*")

    def classifier(self) -> HeadShape:
        """The classifier over the first row, or over each token."""
        if self.config.pooling.task is Task.TOKEN_CLASSIFY:
            return HeadShape("classifier")
        return HeadShape("classifier.out_proj", "classifier.dense", "gelu")

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Bert.names`, with the layer that widens the embeddings."""
        return {**super().names(), "widen": f"{self.prefix}embeddings_project"}
