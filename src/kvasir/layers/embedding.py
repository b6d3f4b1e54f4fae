"""Rows of a table by id: tokens, positions, token types."""

from __future__ import annotations

import torch
from torch import Tensor

from kvasir.layers.module import Module


class Embedding(Module):
    """ids: int64 [T] -> float32 [T, width]."""

    def __init__(self, size: int, width: int):
        self.size, self.width = size, width
        self.weight: Tensor

    def __call__(self, ids_T: Tensor) -> Tensor:
        return self.weight[ids_T].float()

    def expects(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.size, self.width)}

    def put(self, name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.weight = tensor.to(device, dtype)
        return self.weight
