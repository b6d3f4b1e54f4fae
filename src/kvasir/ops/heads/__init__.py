"""Ops on rows that are divided into heads, for latent attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvasir.ops.registry import op_with

if TYPE_CHECKING:
    from torch import Tensor


def _products(x_THK: Tensor, weight_SNk: Tensor) -> tuple[tuple[int, ...], ...]:
    heads = x_THK.shape[-2]
    return ((heads, weight_SNk.shape[-2] // heads),)


@op_with(_products)
def head_linear(x_THK: Tensor, weight_SNk: Tensor) -> Tensor:
    """Each head times its own matrix: x W_h^T, float32 [T, H, N / H]. x: float32 [T, H, K].

    weight: the matrices of the heads below each other, [N, K], as in `linear`.
    """
    ...


def _joined(a_THd: Tensor, b_THe: Tensor) -> tuple[tuple[int, ...], ...]:
    return ((a_THd.shape[-2], a_THd.shape[-1] + b_THe.shape[-1]),)


@op_with(_joined)
def join_heads(a_THd: Tensor, b_THe: Tensor) -> Tensor:
    """The dimensions of both for each head, float32 [T, H, d + e]. a: [T, H, d], b: [T, H, e]."""
    ...
