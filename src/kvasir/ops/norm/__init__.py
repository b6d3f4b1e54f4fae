"""Normalisation over the last dimension, in float32. Sums use a halving tree, so that a row's bits depend only on the
row and the width.

RMSNorm: arXiv:1910.07467. LayerNorm: arXiv:1607.06450.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvasir.ops.native import reason
from kvasir.ops.registry import op

if TYPE_CHECKING:
    from torch import Tensor


@op
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight. x: float32 [..., D]; weight: float32 [D], None for a factor of 1."""
    ...


rms_norm.impl_at("kvasir.ops.norm.native:rms_norm_native", "native", on="cpu", refuses=lambda facts: reason())


@op
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias. x: float32 [..., D]; weight, bias: float32 [D], or [H, D] with
    a row for each head, or both None."""
    ...
