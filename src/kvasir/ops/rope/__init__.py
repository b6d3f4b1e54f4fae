"""Rotary position embedding (arXiv:2104.09864) on halves: dimension i is rotated with dimension i + d/2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvasir.ops.registry import op

if TYPE_CHECKING:
    from torch import Tensor


@op
def rope(x_THd: Tensor, cos_Th: Tensor, sin_Th: Tensor) -> Tensor:
    """Rotates the heads of each row by its angles. All float32; cos, sin: [T, rotated / 2].

    Only the first `rotated` dimensions of a head are rotated; the others are unchanged.
    """
    ...
