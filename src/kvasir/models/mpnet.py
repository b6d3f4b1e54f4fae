"""MPNet (arXiv:2004.09297): BERT whose scores have a bias by relative position, without token types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.errors import ModelFileError
from kvasir.layers.module import Entry, Take
from kvasir.layers.relative import BucketBias
from kvasir.models.config import Fields
from kvasir.models.encoder import Encoder, EncoderConfig, read_encoder
from kvasir.models.pooling import HeadShape
from kvasir.types import Task

_FIRST = 2  # the position of the first token, after that of padding, whatever pad_token_id says
_BUCKETS, _FARTHEST = 32, 128  # fixed in MPNet's code


@dataclass(frozen=True, slots=True)
class MPNetConfig(EncoderConfig):
    """The sizes and settings of an MPNet encoder."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> MPNetConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields(config)
        f.expect("relative_attention_num_buckets", _BUCKETS)
        f.get("type_vocab_size")  # the model has no token types
        sizes = read_encoder(f, vocab_size=30527)
        if sizes["max_position"] <= _FIRST:
            raise ModelFileError(f"{f.where}: max_position_embeddings is {sizes['max_position']}", "expected 3 or more")
        f.finish()
        positions = {"max_position": sizes["max_position"] - _FIRST, "first_position": _FIRST}
        return cls(**{**sizes, "token_types": 0, **positions})


class MPNet(Encoder):
    """A bidirectional encoder with learned positions and a bias by relative position, which all layers share."""

    Config = MPNetConfig
    prefix: ClassVar[str] = "mpnet."
    ignored: ClassVar[tuple[str, ...]] = (
        r"(.*\.)?embeddings\.position_ids",
        r"(.*\.)?pooler\.dense\.(weight|bias)",
        r"lm_head\..*",
    )

    def __init__(self, config: EncoderConfig):
        self.relative = BucketBias(_BUCKETS, config.heads, _FARTHEST)
        super().__init__(config)

    def _relative(self, layer: int) -> dict[str, Any]:
        return {"relative": self.relative}

    def classifier(self) -> HeadShape:
        """The classifier over the first row, or over each token."""
        if self.config.pooling.task is Task.TOKEN_CLASSIFY:
            return HeadShape("classifier")
        return HeadShape("classifier.out_proj", "classifier.dense", "tanh")

    def names(self) -> Mapping[str, Entry]:
        """The name table: where each module's tensors are in a checkpoint, as in `Decoder.names`."""
        prefix, c = self.prefix, self.config
        layer = f"{prefix}encoder.layer.*."
        rows = (c.first_position, c.first_position + c.max_position)
        return {
            "embed": f"{prefix}embeddings.word_embeddings",
            "positions": Take(f"{prefix}embeddings.position_embeddings", rows),
            "norm": f"{prefix}embeddings.LayerNorm",
            "relative.table": f"{prefix}encoder.relative_attention_bias",
            "layers.*.attn.qkv.q": f"{layer}attention.attn.q",
            "layers.*.attn.qkv.k": f"{layer}attention.attn.k",
            "layers.*.attn.qkv.v": f"{layer}attention.attn.v",
            "layers.*.attn.out": f"{layer}attention.attn.o",
            "layers.*.attn_norm": f"{layer}attention.LayerNorm",
            "layers.*.mlp.up": f"{layer}intermediate.dense",
            "layers.*.mlp.down": f"{layer}output.dense",
            "layers.*.mlp_norm": f"{layer}output.LayerNorm",
            **self.pooler.names(),
        }
