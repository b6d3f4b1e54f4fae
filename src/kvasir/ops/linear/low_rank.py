"""Low-rank adapters: adds B (scale * (A x)) to a matrix's product, for the rows with that adapter (arXiv:2106.09685).

Rows are independent of each other and of the other rows' adapters: a row's bits are the same as when computed alone.
"""

from __future__ import annotations

from collections.abc import Callable
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


class LowRankTensors(NamedTuple):
    """The change of a matrix [N, K] as the eager executor has it. a: float32 [S, rank, k], S segments of the sum over
    K. b: float32 [1, N, rank], with the adapter's scale; with a bias of the change as one more column. biased: whether
    it has that. factor: float32 [N] of the whole product (DoRA, arXiv:2402.09353), or None."""

    a: Tensor
    b: Tensor
    biased: bool = False
    factor: Tensor | None = None

    def add(self, out_TN: Tensor, inner_TR: Tensor, scales_T1: Tensor) -> Tensor:
        """factor * (out + b (scale * inner)), float32 [T, N]. inner: the products a x, float32 [T, rank]."""
        import torch

        inner_TR = inner_TR * scales_T1
        if self.biased:
            inner_TR = torch.cat([inner_TR, scales_T1], 1)
        out_TN = out_TN + linear(inner_TR, self.b)
        return out_TN if self.factor is None else out_TN * self.factor


def add_low_rank(
    out_TN: Tensor,
    x_TK: Tensor,
    scales_T1: Tensor,
    pair: LowRankTensors,
    whole: Callable[[Tensor], Tensor] = lambda inner_TR: inner_TR,
) -> Tensor:
    """The product `out` of rows with an adapter, with its change, float32 [T, N]. x: float32 [T, K]. scales: float32
    [T, 1], of the rows' requests. whole: computes the whole a x from this rank's part."""
    return pair.add(out_TN, whole(linear(x_TK, pair.a)), scales_T1)
