"""A layer that limits values smoothly to a bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvasir.layers.module import Module
from kvasir.ops.activation import softcap

if TYPE_CHECKING:
    from torch import Tensor


class SoftCap(Module):
    """x: float32 of any shape, limited smoothly to below `cap` in magnitude; a cap of 0 leaves x unchanged."""

    def __init__(self, cap: float):
        self.cap = cap

    def __call__(self, x: Tensor) -> Tensor:
        return softcap(x, self.cap) if self.cap else x
