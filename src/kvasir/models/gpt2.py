"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm, one matrix for queries, keys and values.

Its checkpoints store `Conv1D` weights as [in, out], the transpose of the other models' weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvasir.caches import CacheKind
from kvasir.errors import ModelFileError
from kvasir.layers.attention import Attention
from kvasir.layers.block import DecoderLayer
from kvasir.layers.embedding import Embedding, VocabularyEmbedding
from kvasir.layers.linear import Head
from kvasir.layers.mlp import ACTIVATIONS, MLP
from kvasir.layers.module import Entry, Module, Take
from kvasir.layers.norm import LayerNorm
from kvasir.models.config import MAX_HEADS, MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB, MAX_WIDTH, Fields
from kvasir.models.pooling import Pooling, pooling_of
from kvasir.types import Task

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch

# letters: T packed token rows, D model width, R chosen rows


@dataclass(frozen=True, slots=True)
class GPT2Config:
    """The sizes and settings of a GPT-2. scales: per layer, the factor of the attention scores."""

    vocab_size: int
    width: int
    inner: int
    num_layers: int
    heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    act: str
    tied: bool
    scales: tuple[float, ...]
    pooling: Pooling

    @property
    def context_length(self) -> int:
        """Maximum tokens of a sequence: the number of learned positions."""
        return self.max_position

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> GPT2Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields(config)
        width = f.integer("n_embd", 1, MAX_WIDTH, 768)
        heads = f.integer("n_head", 1, MAX_HEADS, 12)
        if width % heads:
            raise ModelFileError(f"{f.where}: n_embd {width} is not a multiple of n_head {heads}")
        layers = f.integer("n_layer", 1, MAX_LAYERS, 12)
        f.expect("add_cross_attention", False)
        f.get("reorder_and_upcast_attn")  # selects float32 attention in training; ours is always float32
        found = cls(
            vocab_size=f.integer("vocab_size", 1, MAX_VOCAB, 50257),
            width=width,
            inner=f.integer("n_inner", 1, MAX_WIDTH, 4 * width),
            num_layers=layers,
            heads=heads,
            head_dim=width // heads,
            max_position=f.integer("n_positions", 1, MAX_POSITIONS, 1024),
            norm_eps=f.number("layer_norm_epsilon", 0.0, 1.0, 1e-5),
            act=f.choice("activation_function", tuple(ACTIVATIONS), "gelu_new"),
            tied=f.flag("tie_word_embeddings", True),
            scales=_scales(f, layers, width // heads),
            pooling=pooling_of(f.values, Pooling("last")),
        )
        f.finish()
        return found


def _scales(f: Fields, layers: int, head_dim: int) -> tuple[float, ...]:
    scale = 1 / math.sqrt(head_dim) if f.flag("scale_attn_weights", True) else 1.0
    by_layer = f.flag("scale_attn_by_inverse_layer_idx", False)
    return tuple(scale / (i + 1) if by_layer else scale for i in range(layers))


class GPT2(Module):
    """A decoder with learned positions, LayerNorms before attention and the MLP, and biases on every linear layer."""

    Config = GPT2Config
    tasks: ClassVar[tuple[Task, ...]] = (Task.GENERATE, Task.EMBED)
    bidirectional: ClassVar[bool] = False
    # A checkpoint of the bare model omits this prefix in its names.
    prefix: ClassVar[str] = "transformer."

    def __init__(self, config: GPT2Config):
        self.config = config
        self.embed = VocabularyEmbedding(config.vocab_size, config.width)
        self.positions = Embedding(config.max_position, config.width)
        self.layers = [self._block(i, config) for i in range(config.num_layers)]
        self.norm = LayerNorm(config.width, config.norm_eps)
        self.head = Head(config.width, config.vocab_size, tied=self.embed if config.tied else None)

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.config.heads

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of unused tensors: the causal masks of old checkpoints and a copy of a tied table."""
        copies = (r"lm_head\.weight",) if self.config.tied else ()
        return (r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias", *copies)

    def _block(self, layer: int, c: GPT2Config) -> DecoderLayer:
        return DecoderLayer(
            LayerNorm(c.width, c.norm_eps),
            Attention(
                layer,
                c.width,
                c.heads,
                self.kv_heads,
                c.head_dim,
                bias=True,
                out_bias=True,
                scale=c.scales[layer],
            ),
            LayerNorm(c.width, c.norm_eps),
            MLP(c.width, c.inner, c.act),
        )

    def forward(self, tokens_T: Tensor, batch: Batch) -> Tensor:
        """Float32 [T, D]: the hidden rows after the last norm."""
        x_TD = self.embed(tokens_T) + self.positions(batch.positions_T)
        for i, layer in enumerate(self.layers):
            x_TD = layer(x_TD, batch)
            batch.after_layer(i, x_TD)
        return self.norm(x_TD)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Float32 [R, vocabulary] logits of the selected hidden rows."""
        return self.head(hidden_RD)

    def pool(self, hidden_nD: np.ndarray, task: str = Task.EMBED) -> np.ndarray:
        """One sequence's hidden rows, float32 [n, D], to its embedding, float32 [D]."""
        return self.config.pooling(hidden_nD)

    def cache_spec(self) -> tuple[CacheKind, ...]:
        """The kind of KV cache of each layer."""
        return tuple(layer.attn.cache() for layer in self.layers if layer.attn is not None)

    def names(self) -> Mapping[str, Entry]:
        """The name table: where each module's tensors are in a checkpoint, as in `Decoder.names`."""
        layer, width = "transformer.h.*.", self.config.width
        qkv = {
            f"layers.*.attn.qkv.{part}": Take(f"{layer}attn.c_attn", (i * width, (i + 1) * width), transposed=True)
            for i, part in enumerate("qkv")
        }
        return qkv | {
            "embed": ("transformer.wte", "lm_head") if self.config.tied else "transformer.wte",
            "positions": "transformer.wpe",
            "norm": "transformer.ln_f",
            "head": "lm_head",
            "layers.*.attn_norm": f"{layer}ln_1",
            "layers.*.attn.out": Take(f"{layer}attn.c_proj", transposed=True),
            "layers.*.mlp_norm": f"{layer}ln_2",
            "layers.*.mlp.up": Take(f"{layer}mlp.c_fc", transposed=True),
            "layers.*.mlp.down": Take(f"{layer}mlp.c_proj", transposed=True),
        }
