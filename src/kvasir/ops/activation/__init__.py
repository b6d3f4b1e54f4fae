"""Activation functions, float32, elementwise.

They are composed of operations whose result does not depend on the element's place in its tensor. torch's own sigmoid,
silu and gelu do not qualify: their vector and scalar loops round differently.
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
    """x * Phi(x), where Phi is the CDF of the standard normal distribution (arXiv:1606.08415)."""
    return x * 0.5 * (1.0 + torch.erf(x * math.sqrt(0.5)))


@op
def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of gelu, from the same paper."""
    inner = (x + x * x * x * 0.044715) * math.sqrt(2.0 / math.pi)
    return x * 0.5 * (1.0 + torch.tanh(inner))


@op
def relu(x: Tensor) -> Tensor:
    """max(x, 0); NaN stays NaN."""
    return torch.clamp_min(x, 0.0)


@op
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)); used for gates."""
    return 1.0 / (1.0 + torch.exp(-x))


@op
def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap): close to x where x is small, never beyond the cap (arXiv:2408.00118)."""
    return torch.tanh(x / cap) * cap


# Keyed by the names in config.json.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "relu": relu,
}
