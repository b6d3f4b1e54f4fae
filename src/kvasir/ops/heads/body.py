"""The torch bodies of the ops on heads."""

from __future__ import annotations

import torch
from torch import Tensor

from kvasir.ops.linear import linear


def head_linear(x_THK: Tensor, weight_SNk: Tensor) -> Tensor:
    heads = x_THK.shape[1]
    matrices = weight_SNk.chunk(heads, 1)
    return torch.stack([linear(x_THK[:, h].contiguous(), matrices[h]) for h in range(heads)], 1)


def join_heads(a_THd: Tensor, b_THe: Tensor) -> Tensor:
    return torch.cat([a_THd, b_THe], -1)
