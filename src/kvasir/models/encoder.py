"""The shared parts of encoders with norms after the residual sums, as in the first transformer (arXiv:1706.03762):
every token attends to the whole text. They give hidden rows, and no logits.

BERT, RoBERTa, DistilBERT and the rotary encoders of Jina, Nomic and GTE are this model with other settings; their files
read their configs and name their tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvasir.caches import CacheKind
from kvasir.errors import ModelFileError
from kvasir.layers.attention import Attention
from kvasir.layers.embedding import Embedding, VocabularyEmbedding
from kvasir.layers.linear import Plain
from kvasir.layers.mlp import ACTIVATIONS, MLP, GatedMLP
from kvasir.layers.module import Entry, Module, Take
from kvasir.layers.moe import MoE
from kvasir.layers.norm import LayerNorm
from kvasir.layers.rope import Rope, RopeScaling
from kvasir.models.config import MAX_HEADS, MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB, MAX_WIDTH, Fields
from kvasir.models.pooling import HeadShape, Pooler, Pooling, pooling_of
from kvasir.types import Task

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch

# letters: T packed token rows, D model width, n rows of one text


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The sizes and settings of an encoder.

    max_position: maximum tokens of a text. first_position: the row of the position table that the first token gets.
    token_types: 0 if the model has none. rope_theta: 0 without a rotary embedding. learned_positions: whether there is
    a table of positions in its place. gated: whether the MLP has a gate.
    embedding_width: of the embeddings if a layer widens them, 0 for that of the model.
    attn_bias, mlp_bias, down_bias: of the projections of attention, of the MLP's first and of its last. pooling: how a
    text's hidden rows become its embedding.
    """

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
    first_position: int = 0
    rope_theta: float = 0.0
    learned_positions: bool = True
    embedding_width: int = 0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    gated: bool = False
    attn_bias: bool = True
    mlp_bias: bool = True
    down_bias: bool = True

    @property
    def context_length(self) -> int:
        """Maximum tokens of a text: the number of positions, or `pooling.max_length` where it is set and smaller."""
        return min(self.max_position, self.pooling.max_length or self.max_position)


def read_encoder(f: Fields, **defaults: Any) -> dict[str, Any]:
    """The fields that BERT-like configs share, as keyword arguments of `EncoderConfig`. defaults: of fields that differ
    from BERT's. Raises ModelFileError for a field out of range, UnsupportedModel for a feature without code."""
    default = {"vocab_size": 30522, "max_position": 512, "token_types": 2, "norm_eps": 1e-12, "act": "gelu", **defaults}
    width = f.integer("hidden_size", 1, MAX_WIDTH, 768)
    heads = f.integer("num_attention_heads", 1, MAX_HEADS, 12)
    if width % heads:
        raise ModelFileError(f"{f.where}: hidden_size {width} is not a multiple of {heads} heads")
    f.expect("is_decoder", False)
    f.expect("is_causal", False)
    f.expect("add_cross_attention", False)
    for name in f.values:
        if name == "tie_word_embeddings" or name.startswith("pooler_"):
            f.get(name)  # used by heads that are not implemented
    return {
        "vocab_size": f.integer("vocab_size", 1, MAX_VOCAB, default["vocab_size"]),
        "width": width,
        "inner": f.integer("intermediate_size", 1, MAX_WIDTH, default.get("inner", 3072)),
        "num_layers": f.integer("num_hidden_layers", 1, MAX_LAYERS, default.get("num_layers", 12)),
        "heads": heads,
        "head_dim": width // heads,
        "max_position": f.integer("max_position_embeddings", 1, MAX_POSITIONS, default["max_position"]),
        "token_types": f.integer("type_vocab_size", default.get("fewest_types", 1), MAX_VOCAB, default["token_types"]),
        "norm_eps": f.number("layer_norm_eps", 0.0, 1.0, default["norm_eps"]),
        "act": f.choice("hidden_act", tuple(ACTIVATIONS), default["act"]),
        "pooling": pooling_of(f.values, Pooling("mean")),
    }


class EncoderLayer(Module):
    """x: float32 [T, D] -> [T, D]. A block whose norms follow the sums."""

    def __init__(self, attn: Attention, attn_norm: LayerNorm, mlp: MLP | GatedMLP | MoE, mlp_norm: LayerNorm):
        self.attn, self.attn_norm, self.mlp, self.mlp_norm = attn, attn_norm, mlp, mlp_norm

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        mixed_TD = self.attn_norm(x_TD + self.attn(x_TD, batch))
        return self.mlp_norm(mixed_TD + self.mlp(mixed_TD, batch))


class Encoder(Module):
    """Tokens to hidden rows, in both directions. A text has token type 0, and the second text of a pair token type 1. A
    subclass names the tensors."""

    bidirectional: ClassVar[bool] = True
    # A checkpoint of the bare model omits this prefix in its names.
    prefix: ClassVar[str]
    # Patterns of tensors that are not used: other heads, and position ids stored by old checkpoints.
    ignored: ClassVar[tuple[str, ...]]

    def __init__(self, config: EncoderConfig):
        c = self.config = config
        narrow = c.embedding_width or c.width
        self.embed = VocabularyEmbedding(c.vocab_size, narrow)
        self.positions = self.rope = self.token_types = None
        if c.token_types:
            self.token_types = Embedding(c.token_types, narrow)
            self.token_types.adaptable = False  # looked up by type, not by token
        if c.rope_theta:
            self.rope = Rope(c.head_dim, c.rope_theta, c.rope_scaling)
        elif c.learned_positions:
            self.positions = Embedding(c.max_position, narrow)
        self.norm = LayerNorm(narrow, c.norm_eps)
        self.widen = Plain(narrow, c.width, bias=True) if c.embedding_width else None
        self.layers = [self._block(i, c) for i in range(c.num_layers)]
        self.pooler = Pooler(c.pooling, c.width, self.classifier())
        size = c.pooling.token_heads.embed
        self.tokens = Plain(c.width, size, bias=True) if size else None

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What its head is for."""
        task = self.config.pooling.task
        return (task,) if self.pooler.classifier and task else (Task.EMBED, *self.config.pooling.token_heads.tasks)

    @property
    def outputs(self) -> Mapping[str, str]:
        """The tasks that are pooled from other rows than the forward's result: task -> name of the rows."""
        return {Task.TOKEN_EMBED: "tokens"} if self.tokens is not None else {}

    def classifier(self) -> HeadShape | None:
        """The classifier of the family; None if it has none."""
        return None

    def _relative(self, layer: int) -> dict[str, Any]:
        """The options of a layer's attention by relative position."""
        return {}

    def _block(self, layer: int, c: EncoderConfig) -> EncoderLayer:
        options = {"rope": self.rope, "bias": c.attn_bias, "out_bias": c.attn_bias, **self._relative(layer)}
        gated = GatedMLP(c.width, c.inner, c.act, c.mlp_bias, c.down_bias) if c.gated else None
        return EncoderLayer(
            Attention(layer, c.width, c.heads, c.heads, c.head_dim, **options),
            LayerNorm(c.width, c.norm_eps),
            gated or MLP(c.width, c.inner, c.act, c.mlp_bias),
            LayerNorm(c.width, c.norm_eps),
        )

    def forward(self, tokens_T: Tensor, batch: Batch) -> Tensor:
        """Float32 [T, D]: the hidden rows after the last block."""
        x_TD = self.embed(tokens_T)
        if self.token_types is not None:
            types = self.token_types
            x_TD = x_TD + (types.of_types(batch.types_T) if self.has_pairs else types.row(0))
        if self.positions is not None:
            x_TD = x_TD + self.positions(batch.positions_T)
        x_TD = self.norm(x_TD)
        if self.widen is not None:
            x_TD = self.widen(x_TD, batch)
        for i, layer in enumerate(self.layers):
            x_TD = layer(x_TD, batch)
            batch.after_layer(i, x_TD)
        if self.tokens is not None:
            batch.keep("tokens", self.tokens(x_TD, batch))
        return x_TD

    @property
    def has_pairs(self) -> bool:
        """Whether the tokens of a second text have a type of their own: in classifiers, which may compare two texts."""
        return self.config.token_types > 1 and self.pooler.classifier is not None

    def pool(self, hidden_nD: np.ndarray, task: str = Task.EMBED) -> np.ndarray:
        """One text's hidden rows, float32 [n, D], to the result of a task, float32."""
        return self.pooler(hidden_nD, task)

    def cache_spec(self) -> tuple[CacheKind, ...]:
        """The kind of KV cache of each layer."""
        return tuple(layer.attn.cache() for layer in self.layers)

    def names(self) -> Mapping[str, Entry]:
        """The name table: where each module's tensors are in a checkpoint, as in `Decoder.names`."""
        raise NotImplementedError(f"{type(self).__name__} names its tensors")


def fused(targets: str, name: str, width: int) -> dict[str, Take]:
    """Name table entries of the parts of a matrix, each of `width` rows, in their order."""
    return {target: Take(name, (i * width, (i + 1) * width)) for i, target in enumerate(targets.split())}
