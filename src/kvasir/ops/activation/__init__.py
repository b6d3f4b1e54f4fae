"""Activation functions, float32, elementwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvasir.ops.registry import op

if TYPE_CHECKING:
    from torch import Tensor


@op
def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) (arXiv:1702.03118)."""
    ...


@op
def gelu(x: Tensor) -> Tensor:
    """x * Phi(x), where Phi is the CDF of the standard normal distribution (arXiv:1606.08415)."""
    ...


@op
def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of gelu, from the same paper."""
    ...


@op
def relu(x: Tensor) -> Tensor:
    """max(x, 0); NaN stays NaN."""
    ...


@op
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)); used for gates."""
    ...


@op
def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate * sigmoid(1.702 gate) * (up + 1), with gate at most 7 and up within [-7, 7] (gpt-oss, arXiv:2508.10925)."""
    ...


@op
def scale_rows(x_TD: Tensor, factor_T1: Tensor) -> Tensor:
    """Each row times its own factor. factor: float32 [T, 1]."""
    ...


@op
def scale_heads(x_THd: Tensor, factor_TH: Tensor) -> Tensor:
    """Each head of each row times its own factor. factor: float32 [T, H]."""
    ...


@op
def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap): close to x where x is small, never beyond the cap (arXiv:2408.00118)."""
    ...


@op
def clamp(x: Tensor, low: float, high: float) -> Tensor:
    """x within [low, high]; NaN stays NaN."""
    ...


@op
def xielu(x: Tensor, a: float, b: float, beta: float, eps: float) -> Tensor:
    """xIELU (arXiv:2411.13010): a x^2 + beta x where x > 0, else b (e^min(x, eps) - 1 - x) + beta x."""
    ...


def relu2(x: Tensor) -> Tensor:
    """The square of relu (arXiv:2109.08668)."""
    positive = relu(x)
    return positive * positive


# Keyed by the names in config.json.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "relu": relu,
    "relu2": relu2,
}
