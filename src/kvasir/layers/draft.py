"""Layers of heads that draft: for multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2), the first layer
of EAGLE-3 (arXiv:2503.01840) with the norms before it, and attention of DFlash (arXiv:2602.06036)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvasir.layers.attention import Attention
from kvasir.layers.block import DecoderLayer
from kvasir.layers.linear import Head, Plain
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.module import Module
from kvasir.layers.norm import RMSNorm
from kvasir.layers.places import Place
from kvasir.ops.heads import join_heads
from kvasir.ops.ssm import grouped_rms_norm

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch


def side_by_side(a_TD: Tensor, b_TD: Tensor, width: int) -> Tensor:
    """Both rows, float32 [T, 2 * width]."""
    return join_heads(a_TD.view(-1, 1, width), b_TD.view(-1, 1, width)).flatten(1)


class DraftLayer(Module):
    """embedded, hidden: float32 [T, D] -> [T, D], the rows before the last norm. hidden_first: whether the matrix reads
    the hidden rows before the embedded ids. head: logits of its own, None if it has the decoder's."""

    def __init__(
        self,
        block: DecoderLayer,
        norms: tuple[RMSNorm, RMSNorm, RMSNorm],
        hidden_first: bool = False,
        head: Head | None = None,
    ):
        self.embed_norm, self.hidden_norm, self.norm = norms
        self.width = self.norm.width
        self.joint = Plain(2 * self.width, self.width)
        self.block, self.hidden_first, self.head = block, hidden_first, head

    def __call__(self, embedded_TD: Tensor, hidden_TD: Tensor, batch: Batch) -> Tensor:
        first_TD, second_TD = self.embed_norm(embedded_TD), self.hidden_norm(hidden_TD)
        if self.hidden_first:
            first_TD, second_TD = second_TD, first_TD
        both_TE = side_by_side(first_TD, second_TD, self.width)
        return self.block(self.joint(both_TE, batch), batch)


class EagleLayer(Module):
    """embedded, rows: float32 [T, D] -> [T, D]. Attention reads both, each under a norm of its own, side by side; its
    result is added to the rows.

    norms: of the embedded ids, of the rows, and of the MLP's input. attn: its `inputs` are 2 D. adds_normed: whether it
    is added to the rows under their norm.
    """

    def __init__(self, norms: tuple[RMSNorm, RMSNorm, RMSNorm], attn: Attention, mlp: GatedMLP, adds_normed: bool):
        self.embed_norm, self.hidden_norm, self.mlp_norm = norms
        self.attn, self.mlp, self.adds_normed = attn, mlp, adds_normed
        self.width = self.mlp_norm.width

    def __call__(self, embedded_TD: Tensor, rows_TD: Tensor, batch: Batch) -> Tensor:
        normed_TD = self.hidden_norm(rows_TD)
        both_TE = side_by_side(self.embed_norm(embedded_TD), normed_TD, self.width)
        mixed_TD = (normed_TD if self.adds_normed else rows_TD) + self.attn(both_TE, batch)
        return mixed_TD + self.mlp(self.mlp_norm(mixed_TD), batch)


class ContextAttention(Attention):
    """Attention of a block's rows, which also keeps keys and values of other rows: those of the positions before."""

    def keep(self, x_TD: Tensor, batch: Batch) -> None:
        """Writes the keys and values of rows, float32 [T, D], into the cache."""
        k, v = (self.qkv.apply(part, x_TD, batch) for part in "kv")
        k_TKd = k.view(-1, self.kv_heads, self.head_dim)
        assert self.k_norm is not None and self.rope is not None
        k_TKd = self.rope(self.k_norm(k_TKd), batch.angles(self.rope))
        batch.store(self.layer, k_TKd, v.view(-1, self.kv_heads, self.value_dim))


class ChunkNorm(Module):
    """An RMSNorm with weights of its own over each of the equal chunks of a row. x: float32 [T, chunks * width]. The
    checkpoint has a vector for each, in modules numbered from 0."""

    weight: Tensor

    def __init__(self, chunks: int, width: int, eps: float):
        self.chunks, self.width, self.eps = chunks, width, eps
        self._parts: dict[str, np.ndarray] = {}

    def __call__(self, x_TX: Tensor) -> Tensor:
        x_TCd = x_TX.view(-1, self.chunks, self.width)
        return grouped_rms_norm(x_TCd, self.weight, self.eps).flatten(1)

    def expects(self) -> dict[str, tuple[int, ...]]:
        return {f"{i}.weight": (self.width,) for i in range(self.chunks)}

    def put(self, name: str, array: Any, place: Place) -> Any:
        self._parts[name] = np.asarray(array, np.float32)
        if len(self._parts) == self.chunks:
            self.weight = place.exact(np.concatenate([self._parts[part] for part in self.expects()]))
        return place.exact(array)
