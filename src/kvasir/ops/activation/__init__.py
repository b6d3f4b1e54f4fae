"""Activation functions, float32, element by element.

They are put together from operations whose result is the same wherever an element lies in its tensor. torch's
own sigmoid, silu and gelu are not: their vector and scalar loops round differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kvasir.ops.registry import op


@op
def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) (arXiv:1702.03118)."""
    return x / (1.0 + torch.exp(-x))


@op
def gelu(x: Tensor) -> Tensor:
    """x * Phi(x), Phi the normal distribution function (arXiv:1606.08415)."""
    return x * 0.5 * (1.0 + torch.erf(x * math.sqrt(0.5)))


@op
def gelu_tanh(x: Tensor) -> Tensor:
    """The approximation of gelu by tanh, of the same paper."""
    inner = (x + x * x * x * 0.044715) * math.sqrt(2.0 / math.pi)
    return x * 0.5 * (1.0 + torch.tanh(inner))


@op
def relu(x: Tensor) -> Tensor:
    """max(x, 0); NaN stays NaN."""
    return torch.clamp_min(x, 0.0)


@op
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), the share that a gate lets through."""
    return 1.0 / (1.0 + torch.exp(-x))


@op
def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap): x where it is small, never beyond the cap (arXiv:2408.00118)."""
    return torch.tanh(x / cap) * cap


# By the names that config.json uses.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "relu": relu,
}
