"""Rotary position embedding (arXiv:2104.09864) on halves: dimension i is rotated with dimension i + d/2."""

from __future__ import annotations

import torch
from torch import Tensor

from kvasir.ops.registry import op


@op
def rope(x_THd: Tensor, cos_Th: Tensor, sin_Th: Tensor) -> Tensor:
    """Rotates the heads of each row by its angles. All float32; cos, sin: [T, rotated / 2].

    Only the first `rotated` dimensions of a head are rotated; the others are unchanged.
    """
    half = cos_Th.shape[-1]
    cos, sin = cos_Th.unsqueeze(1), sin_Th.unsqueeze(1)
    a, b = x_THd[..., :half], x_THd[..., half : 2 * half]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x_THd[..., 2 * half :]], dim=-1)
