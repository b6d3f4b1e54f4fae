"""The torch body of rope."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(x_THd: Tensor, cos_Th: Tensor, sin_Th: Tensor) -> Tensor:
    half = cos_Th.shape[-1]
    cos, sin = cos_Th.unsqueeze(1), sin_Th.unsqueeze(1)
    a, b = x_THd[..., :half], x_THd[..., half : 2 * half]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x_THd[..., 2 * half :]], dim=-1)
