"""Normalisation over the last dimension, in float32. Sums use a halving tree, so that a row's bits depend only on the
row and the width.

RMSNorm: arXiv:1910.07467. LayerNorm: arXiv:1607.06450.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvasir.ops.registry import op


def tree_sum(x: Tensor) -> Tensor:
    """The sum over the last dimension [..., n] -> [..., 1] by halving; an odd width is padded with a zero."""
    while (width := x.shape[-1]) > 1:
        if width % 2:
            x = F.pad(x, (0, 1))
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight. x: float32 [..., D], weight: float32 [D]."""
    mean = tree_sum(x * x) / x.shape[-1]
    return x * (1.0 / torch.sqrt(mean + eps)) * weight


@op
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias. x: float32 [..., D]; weight, bias: float32 [D]."""
    centred = x - tree_sum(x) / x.shape[-1]
    variance = tree_sum(centred * centred) / x.shape[-1]
    return centred * (1.0 / torch.sqrt(variance + eps)) * weight + bias
