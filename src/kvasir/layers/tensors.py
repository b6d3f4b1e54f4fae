"""Modules that keep torch tensors, for the eager executor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvasir.errors import UnsupportedModel
from kvasir.layers.places import padded


def torch_dtype(name: str) -> torch.dtype:
    """torch's type of the name "float32", "bfloat16" or "float16", or of the codes of "int8" or "fp8"."""
    return torch.float8_e4m3fn if name == "fp8" else getattr(torch, name)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type, which `torch_dtype` takes."""
    return "fp8" if dtype == torch.float8_e4m3fn else str(dtype).removeprefix("torch.")


def tensor_of(array: Any) -> Tensor:
    """A tensor that shares the memory of an array, whose type may be one of ml_dtypes; a tensor is returned as it is.

    Raises UnsupportedModel for a type that torch does not have."""
    if isinstance(array, Tensor):
        return array
    dtype = getattr(torch, array.dtype.name, None)
    if dtype is None:
        raise UnsupportedModel(f"torch has no {array.dtype.name}", "use the model in float32, float16 or bfloat16")
    plain = array.view(f"V{array.dtype.itemsize}").view(f"u{array.dtype.itemsize}")
    return torch.from_numpy(plain).view(dtype)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A place on a torch device. dtype: of the weights' matrices."""

    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"

    def exact(self, array: Any) -> Tensor:
        return tensor_of(array).to(self.device, torch.float32).contiguous()

    def matrix(self, array_NK: Any) -> Tensor:
        return tensor_of(array_NK).to(self.device, self.dtype)

    def segmented(self, array_NK: Any, segments: int) -> Tensor:
        """Each segment ends in zero columns up to its `padded` width. A view if nothing has to move."""
        weight = self.matrix(array_NK).unflatten(1, (segments, -1)).transpose(0, 1)
        missing = padded(weight.shape[-1], self.dtype.itemsize) - weight.shape[-1]
        return (F.pad(weight, (0, missing)) if missing else weight).contiguous()

    def in_float32(self) -> TensorPlace:
        return replace(self, dtype=torch.float32)
