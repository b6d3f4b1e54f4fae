"""Batches of matrix products of which each has the same bits in any batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BATCH = 128


def products(a_bmk: Tensor, b_bkn: Tensor) -> Tensor:
    """float32 [b, m, n]. A GPU's library chooses its kernel, and so the order of a sum, by the size of the batch (in
    cuBLAS 13.0 on sm_90 at 1, 16, 32 and 64 products) and by the strides; so it gets batches of one size there."""
    return torch.bmm(a_bmk, b_bkn) if a_bmk.device.type == "cpu" else in_batches(a_bmk, b_bkn)


def in_batches(a_bmk: Tensor, b_bkn: Tensor) -> Tensor:
    """As `products`, in contiguous batches of BATCH."""
    count = a_bmk.shape[0]
    a, b = (F.pad(x, (0, 0, 0, 0, 0, -count % BATCH)).contiguous() for x in (a_bmk, b_bkn))
    out = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=a.dtype, device=a.device)
    for first in range(0, count, BATCH):
        part = slice(first, first + BATCH)
        torch.bmm(a[part], b[part], out=out[part])
    return out[:count]
