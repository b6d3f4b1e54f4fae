"""Low-rank adapters: adds scale * B (A x) to a matrix's product, for the rows with that adapter (arXiv:2106.09685).

Rows are independent of each other and of the other rows' adapters: a row's bits are the same as when computed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvasir.ops.linear import linear

if TYPE_CHECKING:
    from torch import Tensor


class LowRankPair(NamedTuple):
    """An adapter's change of one matrix [N, K]: a float32 [rank, K], b float32 [N, rank], with the scale included in b:
    arrays, or tensors of the eager executor. The sum over K is computed in `segments`, like that of the matrix."""

    a: Any
    b: Any
    segments: int = 1


def low_rank(slot: str, shape: tuple[int, int], a: Any, b: Any, scale: float) -> LowRankPair:
    """The pair for a matrix of this shape, from A [rank, inputs] and B [outputs, rank]: arrays of floats, or
    tensors in the host's memory. Raises ValueError if the shapes do not match."""
    a, b = (np.asarray(x, np.float32) for x in (a, b))
    outputs, inputs = shape
    rank = a.shape[0] if a.ndim == 2 else 0
    if rank < 1 or (a.shape, b.shape) != ((rank, inputs), (outputs, rank)):
        raise ValueError(f"{slot} needs A [rank, {inputs}] and B [{outputs}, rank], not {[*a.shape]} and {[*b.shape]}")
    return LowRankPair(np.ascontiguousarray(a), np.ascontiguousarray(b * np.float32(scale)))


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
            out_TN = (out_TN + delta_TN).where(mine_T1, out_TN)
    return out_TN
