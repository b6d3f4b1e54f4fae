"""Modules that keep torch tensors, for the eager executor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_GROUP = 32  # elements of a 16-bit row that a product may read at once


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A place on a torch device. dtype: of the weights' matrices."""

    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"

    def exact(self, array: Any) -> Tensor:
        return torch.as_tensor(array).to(self.device, torch.float32).contiguous()

    def matrix(self, array_NK: Any) -> Tensor:
        return torch.as_tensor(array_NK).to(self.device, self.dtype)

    def segmented(self, array_NK: Any, segments: int) -> Tensor:
        """A 16-bit type is zero-padded after each segment to a multiple of 32, because products of other depths may
        read into the next row. A view if nothing has to move."""
        weight = self.matrix(array_NK).unflatten(1, (segments, -1)).transpose(0, 1)
        missing = -weight.shape[-1] % _GROUP if self.dtype != torch.float32 else 0
        return (F.pad(weight, (0, missing)) if missing else weight).contiguous()

    def in_float32(self) -> TensorPlace:
        return replace(self, dtype=torch.float32)
