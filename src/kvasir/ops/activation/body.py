"""The torch bodies of the activation functions.

They are composed of operations whose result does not depend on the element's place in its tensor. torch's own sigmoid,
silu and gelu do not qualify: their vector and scalar loops round differently.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def silu(x: Tensor) -> Tensor:
    return x / (1.0 + torch.exp(-x))


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x * math.sqrt(0.5)))


def gelu_tanh(x: Tensor) -> Tensor:
    inner = (x + x * x * x * 0.044715) * math.sqrt(2.0 / math.pi)
    return x * 0.5 * (1.0 + torch.tanh(inner))


def relu(x: Tensor) -> Tensor:
    return torch.clamp_min(x, 0.0)


def sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-x))


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * sigmoid(gate * 1.702) * (up + 1.0)


def scale_rows(x_TD: Tensor, factor_T1: Tensor) -> Tensor:
    return x_TD * factor_T1


def scale_heads(x_THd: Tensor, factor_TH: Tensor) -> Tensor:
    return x_THd * factor_TH[..., None]


def softcap(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    return x.clamp(low, high)


def xielu(x: Tensor, a: float, b: float, beta: float, eps: float) -> Tensor:
    straight = x * beta
    curved = torch.exp(x.clamp(max=eps)) - 1.0 - x
    return torch.where(x > 0, x * a * x + straight, curved * b + straight)
