"""The weights of attention, where someone wants to see them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvasir.ops.attention import paged_attention, plan_attention
from kvasir.plan import Work

_COLUMNS = 64  # positions whose weights are found at a time


def attention_weights(
    q_nHd: Tensor,
    k_cache: Tensor,
    work: Work,
    table: np.ndarray,
    *,
    window: int,
    scale: float,
    softcap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """By which weights each row of a work mixes values: float32 [n, H, end], 0 where it sees nothing. A sink's share is
    missing from the sum.

    They are what `paged_attention` makes of values that are 1 at one position each, so they depend on nothing else of a
    step either. table: the block ids of the work's row. The other arguments are as for `paged_attention`; q has the
    work's rows alone.
    """
    size, kv_heads = k_cache.shape[1:3]
    low, blocks = max(0, work.start - window + 1) // size if window else 0, -(-work.end // size)
    k = k_cache.new_zeros(blocks, *k_cache.shape[1:])
    k[low:] = k_cache[torch.from_numpy(table[low:blocks].astype(np.int64)).to(k.device)]
    plan = plan_attention(
        [replace(work, row=0)], [0], [np.arange(blocks)], group=q_nHd.shape[1] // kv_heads, window=window,
        block_size=size, width=kv_heads * max(q_nHd.shape[2], _COLUMNS), device=k.device,
    )  # fmt: skip
    parts = []
    for first in range(0, work.end, _COLUMNS):
        ones = torch.arange(first, min(first + _COLUMNS, work.end), device=k.device)
        values = torch.zeros(blocks * size, kv_heads, _COLUMNS, device=k.device)
        values[ones, :, ones - first] = 1.0
        mixed = paged_attention(q_nHd, k, values.view(blocks, size, kv_heads, _COLUMNS), plan, scale, softcap, sinks_H)
        parts.append(mixed[..., : len(ones)])
    return torch.cat(parts, -1)
