"""Normalisation layers over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from kvasir.layers.module import Module
from kvasir.ops.norm import layer_norm, rms_norm


class RMSNorm(Module):
    """x: float32 [..., width]."""

    def __init__(self, width: int, eps: float):
        self.width, self.eps = width, eps
        self.weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def expects(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.width,)}

    def put(self, name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        kept = tensor.to(device, torch.float32).contiguous()
        setattr(self, name, kept)
        return kept


class OffsetRMSNorm(RMSNorm):
    """An RMSNorm whose checkpoint stores weight - 1; the 1 is added in float32."""

    def put(self, name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        return super().put(name, tensor.to(torch.float32) + 1.0, dtype, device)


class LayerNorm(RMSNorm):
    """x: float32 [..., width]; has a bias."""

    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def expects(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.width,), "bias": (self.width,)}
