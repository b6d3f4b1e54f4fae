"""Low-rank adapters: adds scale * B (A x) to a matrix's product, for the rows with that adapter (arXiv:2106.09685).

Rows are independent of each other and of the other rows' adapters: a row's bits are the same as when computed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvasir.ops.linear import linear


class LowRankPair(NamedTuple):
    """An adapter's change of one matrix [N, K]: a float32 [rank, K], b float32 [N, rank], with the scale included in b.
    The sum over K is computed in `segments`, like that of the matrix."""

    a: Tensor
    b: Tensor
    segments: int = 1


def low_rank(slot: str, shape: tuple[int, int], a: Any, b: Any, scale: float) -> LowRankPair:
    """The pair for a matrix of this shape, from A [rank, inputs] and B [outputs, rank], arrays or tensors of floats.
    Raises ValueError if the shapes do not match."""
    a, b = (torch.as_tensor(x).detach().to("cpu", torch.float32) for x in (a, b))
    outputs, inputs = shape
    rank = a.shape[0] if a.dim() == 2 else 0
    if rank < 1 or (tuple(a.shape), tuple(b.shape)) != ((rank, inputs), (outputs, rank)):
        raise ValueError(f"{slot} needs A [rank, {inputs}] and B [{outputs}, rank], not {[*a.shape]} and {[*b.shape]}")
    return LowRankPair(a.contiguous(), (b * scale).contiguous())


def add_low_rank(
    out_TN: Tensor,
    x_TK: Tensor,
    adapters_T: Tensor,
    pairs: Mapping[int, LowRankPair],
    whole: Callable[[Tensor], Tensor] = lambda inner_TR: inner_TR,
) -> Tensor:
    """out + b (a x) for the rows whose adapter has a pair, float32 [T, N]. x: float32 [T, K]. adapters: ids [T]. whole:
    computes the whole a x from this rank's part."""
    for adapter, pair in pairs.items():
        mine_T1 = (adapters_T == adapter).unsqueeze(1)
        if mine_T1.any():
            a_SRk = pair.a.unflatten(1, (pair.segments, -1)).transpose(0, 1).contiguous()
            delta_TN = linear(whole(linear(x_TK, a_SRk)), pair.b.unsqueeze(0))
            out_TN = torch.where(mine_T1, out_TN + delta_TN, out_TN)
    return out_TN
