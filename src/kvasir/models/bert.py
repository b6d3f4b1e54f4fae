"""BERT as an embedding model (arXiv:1810.04805, pooled as in arXiv:1908.10084), with bidirectional attention.

Its blocks are post-norm: they normalise after each residual sum. A text is a single sequence of token type 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvasir.caches import CacheKind
from kvasir.errors import ModelFileError
from kvasir.layers.attention import Attention
from kvasir.layers.embedding import Embedding, VocabularyEmbedding
from kvasir.layers.mlp import ACTIVATIONS, MLP
from kvasir.layers.module import Entry, Module
from kvasir.layers.norm import LayerNorm
from kvasir.models.config import MAX_HEADS, MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB, MAX_WIDTH, Fields
from kvasir.models.pooling import Pooling, pooling_of
from kvasir.types import Task

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch

# letters: T packed token rows, D model width, n rows of one text


@dataclass(frozen=True, slots=True)
class BertConfig:
    """The sizes and settings of a BERT encoder. pooling: how a text's hidden rows become its embedding."""

    vocab_size: int
    width: int
    inner: int
    num_layers: int
    heads: int
    head_dim: int
    max_position: int
    token_types: int
    norm_eps: float
    act: str
    pooling: Pooling

    @property
    def context_length(self) -> int:
        """Maximum tokens of a text: the number of learned positions, or `pooling.max_length` where it is set and
        smaller."""
        return min(self.max_position, self.pooling.max_length or self.max_position)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> BertConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields(config)
        width = f.integer("hidden_size", 1, MAX_WIDTH, 768)
        heads = f.integer("num_attention_heads", 1, MAX_HEADS, 12)
        if width % heads:
            raise ModelFileError(f"{f.where}: hidden_size {width} is not a multiple of {heads} heads")
        f.expect("position_embedding_type", "absolute")
        f.expect("is_decoder", False)
        f.expect("add_cross_attention", False)
        for name in config:
            if name == "tie_word_embeddings" or name.startswith("pooler_"):
                f.get(name)  # used by heads that are not implemented
        found = cls(
            vocab_size=f.integer("vocab_size", 1, MAX_VOCAB, 30522),
            width=width,
            inner=f.integer("intermediate_size", 1, MAX_WIDTH, 3072),
            num_layers=f.integer("num_hidden_layers", 1, MAX_LAYERS, 12),
            heads=heads,
            head_dim=width // heads,
            max_position=f.integer("max_position_embeddings", 1, MAX_POSITIONS, 512),
            token_types=f.integer("type_vocab_size", 1, MAX_VOCAB, 2),
            norm_eps=f.number("layer_norm_eps", 0.0, 1.0, 1e-12),
            act=f.choice("hidden_act", tuple(ACTIVATIONS), "gelu"),
            pooling=pooling_of(f.values, Pooling("mean")),
        )
        f.finish()
        return found


class EncoderLayer(Module):
    """x: float32 [T, D] -> [T, D]. A block whose norms follow the sums, as in the first transformer
    (arXiv:1706.03762)."""

    def __init__(self, attn: Attention, attn_norm: LayerNorm, mlp: MLP, mlp_norm: LayerNorm):
        self.attn, self.attn_norm, self.mlp, self.mlp_norm = attn, attn_norm, mlp, mlp_norm

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        mixed_TD = self.attn_norm(x_TD + self.attn(x_TD, batch))
        return self.mlp_norm(mixed_TD + self.mlp(mixed_TD, batch))


class Bert(Module):
    """A bidirectional encoder; it has embeddings, but no logits."""

    Config = BertConfig
    tasks: ClassVar[tuple[Task, ...]] = (Task.EMBED,)
    prefix: ClassVar[str] = "bert."
    # Position ids stored by old checkpoints; the pooler; the masked-LM and next-sentence heads.
    ignored: ClassVar[tuple[str, ...]] = (
        r"(bert\.)?embeddings\.position_ids",
        r"(bert\.)?pooler\.dense\.(weight|bias)",
        r"cls\..*",
    )

    def __init__(self, config: BertConfig):
        self.config = config
        self.embed = VocabularyEmbedding(config.vocab_size, config.width)
        self.positions = Embedding(config.max_position, config.width)
        self.token_types = Embedding(config.token_types, config.width)
        self.norm = LayerNorm(config.width, config.norm_eps)
        self.layers = [self._block(i, config) for i in range(config.num_layers)]

    def _block(self, layer: int, c: BertConfig) -> EncoderLayer:
        return EncoderLayer(
            Attention(layer, c.width, c.heads, c.heads, c.head_dim, bias=True, out_bias=True),
            LayerNorm(c.width, c.norm_eps),
            MLP(c.width, c.inner, c.act),
            LayerNorm(c.width, c.norm_eps),
        )

    def forward(self, tokens_T: Tensor, batch: Batch) -> Tensor:
        """Float32 [T, D]: the hidden rows after the last block."""
        x_TD = self.embed(tokens_T) + self.token_types.row(0) + self.positions(batch.positions_T)
        x_TD = self.norm(x_TD)
        for i, layer in enumerate(self.layers):
            x_TD = layer(x_TD, batch)
            batch.after_layer(i, x_TD)
        return x_TD

    def pool(self, hidden_nD: np.ndarray) -> np.ndarray:
        """One text's hidden rows, float32 [n, D], to its embedding, float32 [D]."""
        return self.config.pooling(hidden_nD)

    def cache_spec(self) -> tuple[CacheKind, ...]:
        """The kind of KV cache of each layer."""
        return tuple(layer.attn.cache() for layer in self.layers)

    def names(self) -> Mapping[str, Entry]:
        """The name table: where each module's tensors are in a checkpoint, as in `Decoder.names`."""
        layer = "bert.encoder.layer.*."
        return {
            "embed": "bert.embeddings.word_embeddings",
            "positions": "bert.embeddings.position_embeddings",
            "token_types": "bert.embeddings.token_type_embeddings",
            "norm": "bert.embeddings.LayerNorm",
            "layers.*.attn.qkv.q": f"{layer}attention.self.query",
            "layers.*.attn.qkv.k": f"{layer}attention.self.key",
            "layers.*.attn.qkv.v": f"{layer}attention.self.value",
            "layers.*.attn.out": f"{layer}attention.output.dense",
            "layers.*.attn_norm": f"{layer}attention.output.LayerNorm",
            "layers.*.mlp.up": f"{layer}intermediate.dense",
            "layers.*.mlp.down": f"{layer}output.dense",
            "layers.*.mlp_norm": f"{layer}output.LayerNorm",
        }
