"""Matrix products whose rows are independent of each other.

A library's matmul chooses its summation order by the shape, so a row alone and the same row in a batch can differ in
bits. Here every product has the same shape, tiles of TILE rows; and where the library splits long sums by its thread
count, we split them first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvasir.ops.registry import op, op_with

if TYPE_CHECKING:
    from torch import Tensor

TILE = 32


def _outputs(x_TK: Tensor, weight_SNK: Tensor, bias_N: Tensor | None) -> tuple[tuple[int, ...], ...]:
    """For [S, N, k], or a packed matrix [N, K]."""
    return ((weight_SNK.shape[-2],),)


@op_with(_outputs)
def linear(x_TK: Tensor, weight_SNK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x W^T + bias, float32 [T, N]. x: float32 [T, K]. bias: float32.

    weight: [S, N, k], S segments of the sum over K, float32 or a 16-bit dtype. If S * k > K, each segment of the weight
    ends in zero columns. For 16-bit weights, x is rounded to their dtype; products are accumulated in float32 and
    rounded to that dtype per segment. The segments are added by a balanced tree in float32.
    """
    ...


@op
def round_rows(x_TK: Tensor) -> Tensor:
    """Each row rounded to multiples of its greatest magnitude (at least 1e-5) / 127, ties to even, float32 [T, K]: the
    int8 activations of BitLinear (arXiv:2402.17764). Programs do this in the products with such matrices."""
    ...
