"""Low-rank adapters: scale * B (A x) is added to a matrix's product, for the rows that ask for it (arXiv:2106.09685).

Rows do not see each other, nor which adapters others have: a row's bits are those it has alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvasir.ops.linear import linear


class LowRank(NamedTuple):
    """What an adapter adds to one matrix [N, K]: a float32 [rank, K], b float32 [N, rank], which holds the scale. The
    sum over K is cut as the matrix's own may be, in `segments`."""

    a: Tensor
    b: Tensor
    segments: int = 1


def low_rank(slot: str, shape: tuple[int, int], a: Any, b: Any, scale: float) -> LowRank:
    """The pair for the matrix of this shape from A [rank, inputs] and B [outputs, rank], arrays or tensors of floats.
    Raises ValueError where they do not fit."""
    a, b = (torch.as_tensor(x).detach().to("cpu", torch.float32) for x in (a, b))
    outputs, inputs = shape
    rank = a.shape[0] if a.dim() == 2 else 0
    if rank < 1 or (tuple(a.shape), tuple(b.shape)) != ((rank, inputs), (outputs, rank)):
        raise ValueError(f"{slot} needs A [rank, {inputs}] and B [{outputs}, rank], not {[*a.shape]} and {[*b.shape]}")
    return LowRank(a.contiguous(), (b * scale).contiguous())


def add_low_rank(
    out_TN: Tensor,
    x_TK: Tensor,
    adapters_T: Tensor,
    pairs: Mapping[int, LowRank],
    whole: Callable[[Tensor], Tensor] = lambda inner_TR: inner_TR,
) -> Tensor:
    """out + b (a x) for the rows whose adapter has a pair, float32 [T, N]. x: float32 [T, K]. adapters: ids [T].
    whole: makes a x of what this rank has of it."""
    for adapter, pair in pairs.items():
        mine_T1 = (adapters_T == adapter).unsqueeze(1)
        if mine_T1.any():
            a_SRk = pair.a.unflatten(1, (pair.segments, -1)).transpose(0, 1).contiguous()
            delta_TN = linear(whole(linear(x_TK, a_SRk)), pair.b.unsqueeze(0))
            out_TN = torch.where(mine_T1, out_TN + delta_TN, out_TN)
    return out_TN
