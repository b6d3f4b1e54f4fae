"""The torch bodies of the norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def tree_sum(x: Tensor) -> Tensor:
    """The sum over the last dimension [..., n] -> [..., 1] by halving; an odd width is padded with a zero."""
    while (width := x.shape[-1]) > 1:
        if width % 2:
            x = F.pad(x, (0, 1))
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    mean = tree_sum(x * x) / x.shape[-1]
    out = x * (1.0 / torch.sqrt(mean + eps))
    return out if weight is None else out * weight


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    centred = x - tree_sum(x) / x.shape[-1]
    variance = tree_sum(centred * centred) / x.shape[-1]
    scaled = centred * (1.0 / torch.sqrt(variance + eps))
    return scaled if weight is None or bias is None else scaled * weight + bias
