"""Runs float32 code in float64, to tell rounding from errors in models that amplify rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Wide(TorchFunctionMode):
    """Casts to float32 become casts to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widened(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            return torch.Tensor.double(*args)
        return func(*map(widened, args), **{name: widened(value) for name, value in (kwargs or {}).items()})


@contextmanager
def float64() -> Iterator[None]:
    """In this context torch computes in float64 only, if its inputs are."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(before)
