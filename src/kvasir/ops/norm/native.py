"""The native implementations of the norms."""

from __future__ import annotations

import torch
from torch import Tensor

from kvasir.ops import native
from kvasir.ops.norm import rms_norm
from kvasir.ops.registry import MachineFacts


def _refuses(facts: MachineFacts) -> str:
    return native.reason()


@rms_norm.impl("native", on="cpu", refuses=_refuses)
def rms_norm_native(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The kernel on one thread; copies x if it is not contiguous."""
    x = x.contiguous()
    out = torch.empty_like(x)
    native.rms_norm_arrays(out, x, weight, eps)
    return out
