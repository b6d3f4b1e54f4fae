"""Per-layer embeddings of Gemma 3n and 4: every layer adds a small vector of its own for each token, which a gate
scales. The vectors of all layers are one wide row, the sum of a row of a table and of a projection of the token's
embedding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvasir.layers.embedding import Embedding
from kvasir.layers.linear import Plain
from kvasir.layers.module import Module
from kvasir.layers.norm import RMSNorm
from kvasir.ops.activation import ACTIVATIONS
from kvasir.ops.columns import take_columns
from kvasir.ops.embedding import embedding

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch

# letters: T token rows, D model width, L layers, d width of a layer's vector


class PerLayerEmbedding(Module):
    """tokens: int64 [T], x: float32 [T, D], their scaled embeddings -> float32 [T, L * d].

    vocab: rows of the table; a token beyond it has the first row. every_token: whether there is no such token.
    """

    def __init__(self, vocab: int, width: int, layers: int, size: int, eps: float, *, every_token: bool):
        self.layers, self.size, self.every_token = layers, size, every_token
        self.embed = Embedding(vocab, layers * size)
        self.embed.adaptable = False  # it is read past its lookup
        self.project = Plain(width, layers * size)
        self.norm = RMSNorm(size, eps)
        self.scale = 1 / math.sqrt(width)

    def __call__(self, tokens_T: Tensor, x_TD: Tensor, embed_scale: float, batch: Batch) -> Tensor:
        weight = self.embed.weight
        rows = embedding(tokens_T, weight) if self.every_token else embedding(tokens_T, weight, 0, or_first=True)
        looked_up = rows * embed_scale
        projected = (self.project(x_TD, batch) * self.scale).view(-1, self.layers, self.size)
        return (self.norm(projected).flatten(1) + looked_up) * math.sqrt(0.5)

    def of(self, layer: int, rows: Tensor) -> Tensor:
        """A layer's vectors, float32 [T, d], of the rows that a call gives."""
        return take_columns(rows, layer * self.size, (layer + 1) * self.size)


class PerLayerGate(Module):
    """What a layer adds to x: norm(project(act(gate(x)) * vector)), float32 [T, D]. vector: float32 [T, d]."""

    def __init__(self, width: int, size: int, act: str, eps: float):
        self.gate, self.project = Plain(width, size), Plain(size, width)
        self.norm = RMSNorm(width, eps)
        self.act = ACTIVATIONS[act]

    def __call__(self, x_TD: Tensor, vector_Td: Tensor, batch: Batch) -> Tensor:
        return self.norm(self.project(self.act(self.gate(x_TD, batch)) * vector_Td, batch))
