"""Rows of a table by id: tokens, positions, token types."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvasir.layers.module import Module
from kvasir.ops.embedding import embedding, row


class Embedding(Module):
    """ids: int64 [T] -> float32 [T, width]."""

    def __init__(self, size: int, width: int):
        self.size, self.width = size, width
        self.weight: Tensor

    def __call__(self, ids_T: Tensor) -> Tensor:
        return embedding(ids_T, self.weight)

    def row(self, index: int) -> Tensor:
        """One row, float32 [width], that every token gets."""
        return row(self.weight, index)

    def hold(self, name: str, matrix: Any) -> None:
        """Takes the table in a format of its own (kvasir.ops.linear.packed) in the place of a tensor."""
        self.weight = matrix

    def expects(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.size, self.width)}

    def put(self, name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.weight = tensor.to(device, dtype)
        return self.weight
