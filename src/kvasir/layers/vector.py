"""Layers of the heads that follow pooling: float32 on the host, for few rows, in plain NumPy.

A row's bits depend on the row alone: every sum is taken by halving, which NumPy's and BLAS's own sums do not promise,
and elementary functions are evaluated in float64 and rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from kvasir.layers.module import Module
from kvasir.layers.places import Place

_PRODUCTS = 1 << 16  # held at a time: as many as fit in a core's cache


def tree_sum(x: np.ndarray) -> np.ndarray:
    """The sum over the first axis by halving: for each length the order is fixed."""
    while (n := len(x)) > 1:
        half = n // 2
        halved = x[:half] + x[half : 2 * half]
        x = np.concatenate([halved, x[2 * half :]]) if n % 2 else halved
    return x[0]


class VectorLinear(Module):
    """x: float32 [n, inputs] -> [n, outputs]."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True):
        self.inputs, self.outputs, self.has_bias = inputs, outputs, bias
        self.weight: np.ndarray  # [inputs, outputs]: the sum over the first axis is contiguous
        self.bias: np.ndarray | None = None

    @np.errstate(all="ignore")  # faulty rows give infinities and NaN
    def __call__(self, x_nK: np.ndarray) -> np.ndarray:
        out_nN = np.empty((len(x_nK), self.outputs), np.float32)
        if self.outputs < len(x_nK):  # the same sums, with the rows side by side
            for column in range(self.outputs):
                out_nN[:, column] = tree_sum(x_nK.T * self.weight[:, column, None])
            return out_nN if self.bias is None else out_nN + self.bias
        step = max(1, _PRODUCTS // self.inputs)
        for first in range(0, self.outputs, step):
            columns = slice(first, first + step)
            for row, x_K in enumerate(x_nK):
                out_nN[row, columns] = tree_sum(x_K[:, None] * self.weight[:, columns])
        return out_nN if self.bias is None else out_nN + self.bias

    def expects(self) -> dict[str, tuple[int, ...]]:
        bias = {"bias": (self.outputs,)} if self.has_bias else {}
        return {"weight": (self.outputs, self.inputs), **bias}

    def put(self, name: str, array: Any, place: Place) -> Any:
        kept = place.exact(array)
        setattr(self, name, np.ascontiguousarray(on_host(kept).T))
        return kept


class VectorNorm(Module):
    """A LayerNorm. x: float32 [n, width]."""

    def __init__(self, width: int, eps: float, bias: bool = True):
        self.width, self.eps, self.has_bias = width, np.float32(eps), bias
        self.weight: np.ndarray
        self.bias: np.ndarray | None = None

    @np.errstate(all="ignore")
    def __call__(self, x_nD: np.ndarray) -> np.ndarray:
        width = np.float32(self.width)
        centred_nD = x_nD - (tree_sum(x_nD.T) / width)[:, None]
        variance_n = tree_sum((centred_nD * centred_nD).T) / width
        out_nD = centred_nD / np.sqrt(variance_n + self.eps)[:, None] * self.weight
        return out_nD if self.bias is None else out_nD + self.bias

    def expects(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.width,), **({"bias": (self.width,)} if self.has_bias else {})}

    def put(self, name: str, array: Any, place: Place) -> Any:
        kept = place.exact(array)
        setattr(self, name, on_host(kept))
        return kept


def on_host(kept: Any) -> np.ndarray:
    """An array that a place has made of a module's tensor, in the host's memory."""
    return kept.cpu().numpy() if hasattr(kept, "cpu") else np.asarray(kept)


# --- activation functions -----------------------------------------------------------------------------


def _each(function: Callable[[float], float]) -> Callable[[np.ndarray], np.ndarray]:
    """The function on each number, evaluated in float64 and rounded; NaN for a number that it does not take."""

    def safe(x: float) -> float:
        return function(x) if math.isfinite(x) else math.nan

    def apply(x: np.ndarray) -> np.ndarray:
        values = (safe(value) for value in x.reshape(-1).tolist())
        return np.fromiter(values, np.float32, x.size).reshape(x.shape)

    return apply


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)) without overflow."""
    e = math.exp(-abs(x))
    return (1.0 if x >= 0 else e) / (1.0 + e)


def _gelu_tanh(x: float) -> float:
    return 0.5 * x * (1.0 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "identity": lambda x: x,
    "tanh": _each(math.tanh),
    "relu": lambda x: np.maximum(x, np.float32(0)),
    "gelu": _each(lambda x: 0.5 * x * (1.0 + math.erf(x * math.sqrt(0.5)))),
    "gelu_pytorch_tanh": _each(_gelu_tanh),
    "gelu_new": _each(_gelu_tanh),
    "silu": _each(lambda x: x * sigmoid(x)),
    "sigmoid": _each(sigmoid),
}
