"""A layer for multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvasir.layers.block import DecoderLayer
from kvasir.layers.linear import Plain
from kvasir.layers.module import Module
from kvasir.layers.norm import RMSNorm
from kvasir.ops.heads import join_heads

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch


class DraftLayer(Module):
    """embedded, hidden: float32 [T, D] -> [T, D], the rows before the last norm."""

    def __init__(self, block: DecoderLayer, norms: tuple[RMSNorm, RMSNorm, RMSNorm]):
        self.embed_norm, self.hidden_norm, self.norm = norms
        self.width = self.norm.width
        self.joint = Plain(2 * self.width, self.width)
        self.block = block

    def __call__(self, embedded_TD: Tensor, hidden_TD: Tensor, batch: Batch) -> Tensor:
        embedded_T1D = self.embed_norm(embedded_TD).view(-1, 1, self.width)
        hidden_T1D = self.hidden_norm(hidden_TD).view(-1, 1, self.width)
        return self.block(self.joint(join_heads(embedded_T1D, hidden_T1D).flatten(1), batch), batch)
