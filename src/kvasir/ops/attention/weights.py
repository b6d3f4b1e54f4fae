"""Computes attention weights, for requests that want to inspect them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvasir.ops.attention import paged_attention
from kvasir.ops.attention.plan import plan_attention
from kvasir.ops.attention.relative import Relative
from kvasir.ops.attention.sizes import first_in_window
from kvasir.plan import Work

_COLUMNS = 64  # positions per pass


def attention_weights(
    q_nHd: Tensor,
    k_cache: Tensor,
    work: Work,
    table: np.ndarray,
    *,
    window: int,
    scale: float,
    distance: int = 0,
    softcap: float = 0.0,
    sinks_H: Tensor | None = None,
    relative: Relative | None = None,
    k_nKd: Tensor | None = None,
) -> Tensor:
    """The attention weights of each row of a work: float32 [n, H, end], 0 for masked keys. With a sink, the weights sum
    to less than 1, because its share is not included.

    They are the outputs of `paged_attention` for values that are 1 at one position each, so they too are independent of
    the rest of the step. q: the work's rows only. table: the block ids of the work's row. Other arguments as in
    `paged_attention`.
    """
    size, kv_heads = k_cache.shape[1:3]
    low, blocks = max(0, first_in_window(work.start, window)) // size, -(-work.end // size)
    k = k_cache.new_zeros(blocks, *k_cache.shape[1:])
    k[low:] = k_cache[torch.from_numpy(table[low:blocks].astype(np.int64)).to(k.device)]
    plan = plan_attention(
        [replace(work, row=0)], [0], [np.arange(blocks)], group=q_nHd.shape[1] // kv_heads, window=window,
        block_size=size, width=kv_heads * max(q_nHd.shape[2], _COLUMNS), device=k.device, distance=distance,
    )  # fmt: skip
    parts = []
    for first in range(0, work.end, _COLUMNS):
        ones = torch.arange(first, min(first + _COLUMNS, work.end), device=k.device)
        values = torch.zeros(blocks * size, kv_heads, _COLUMNS, device=k.device)
        values[ones, :, ones - first] = 1.0
        mixed = paged_attention(
            q_nHd, k, values.view(blocks, size, kv_heads, _COLUMNS), plan, scale, softcap, sinks_H, relative, k_nKd
        )
        parts.append(mixed[..., : len(ones)])
    return torch.cat(parts, -1)
