"""Ranks that share one model: the mesh and its collectives. With one rank they do nothing.

A role that reduces (Out, Down) calls `all_reduce` after its matmul, a split output is gathered by
`all_gather`; so the places where ranks meet are written down, and a mesh of several ranks is another class
with these methods.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mesh:
    """One rank. `rank` counts from 0 to `size` - 1."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks' tensors, on every rank."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' tensors side by side in the last dimension, in rank order."""
        return x


SOLO = Mesh()
