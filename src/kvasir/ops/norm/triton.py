"""Triton kernels of the norms, joined with the residual sum before them.

One program computes one row, with the whole row in registers. The order of a row's sum follows its width alone: the
width is a constant of the kernel, and the number of warps a function of it. Tensors begin at multiples of 16 bytes, as
torch allocates them: a kernel compiled for other addresses might sum in another order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kvasir.ops.kernels import begin, joined, rounded
from kvasir.ops.launch import INTERPRETED, launch

if TYPE_CHECKING:
    from torch import Tensor

MOST_WIDTH = 16384


@triton.jit
def rms_scale(x, eps, D: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of a vector of D values, padded with zeros."""
    return 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)


@triton.jit
def normed(x, lanes, mask, weight, norm_bias, eps, D: tl.constexpr):
    """RMSNorm of a vector, or LayerNorm if it has a bias. x is zero where the mask is false."""
    if norm_bias is not None:
        x = tl.where(mask, x - tl.sum(x, 0) / D, 0.0)
    y = x * rms_scale(x, eps, D)
    if weight is not None:
        y = y * tl.load(weight + lanes, mask=mask, other=0.0).to(tl.float32)
    if norm_bias is not None:
        y = y + tl.load(norm_bias + lanes, mask=mask, other=0.0).to(tl.float32)
    return y


@triton.jit(do_not_specialize=["T"])
def _join_norm(
    parts, bias, post_weight, residual, total, weight, norm_bias, out,
    T, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    mask = lanes < D
    places = row * D + lanes
    if parts is not None:
        x = joined(parts, places, mask, T.to(tl.int64) * D, S)
        if bias is not None:
            x = x + tl.load(bias + lanes, mask=mask, other=0.0).to(tl.float32)
        if post_weight is not None:
            x = normed(x, lanes, mask, post_weight, None, eps, D)
        if residual is not None:
            x = tl.load(residual + places, mask=mask, other=0.0) + x
    else:
        x = tl.load(residual + places, mask=mask, other=0.0)
    if total is not None:
        tl.store(total + places, x, mask=mask)
    if out is not None:
        if weight is not None:
            x = normed(x, lanes, mask, weight, norm_bias, eps, D)
        tl.store(out + places, rounded(x, out.dtype.element_ty, UPCAST), mask=mask)


@triton.jit
def _norm(
    x, weight, bias, out, eps, stride,
    D: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    mask = lanes < D
    value = tl.load(x + row * stride + lanes, mask=mask, other=0.0)
    if UPCAST:
        value = value.to(tl.float32)
    if GROUPS > 1:
        weight += (row % GROUPS) * D
    value = normed(value.to(tl.float32), lanes, mask, weight, bias, eps, D)
    tl.store(out + row * D + lanes, rounded(value, out.dtype.element_ty, UPCAST), mask=mask)


def join_norm(
    parts: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Tensor | None,
    eps: float,
    *,
    bias: Tensor | None = None,
    post_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    total: Tensor | None = None,
) -> None:
    """Adds the result of a block to the residual stream, and norms the sum for the next block, in one launch.

        sum = joined(parts) + bias;  sum = rms_norm(sum) * post_weight;  x = residual + sum
        total or else residual = x;  out = rms_norm(x) * weight

    parts: float32 [S, T, D], S of 1, 2, 4 or 8; None: x = residual. bias, post_weight: [D] or None. residual: float32
    [T, D], changed in place unless parts is None or total is given; None: x = sum. total: float32 [T, D], where to
    write x instead. weight: [D]; None: out = x. norm_bias: [D]; out is then layer_norm(x) * weight + norm_bias. out:
    [T, D], float32, bfloat16 or float16, rounded to nearest even; None: no norm. All are contiguous, D <= 16384.
    """
    shaped = residual if parts is None else parts
    assert shaped is not None and (weight is not None or norm_bias is None)
    T, D = shaped.shape[-2:]
    assert D <= MOST_WIDTH and all(x is None or x.is_contiguous() for x in (parts, residual, out, total))
    if total is None and parts is not None:
        total = residual
    assert out is not None or total is not None, "nothing to compute"
    moved = [bias, post_weight, weight, norm_bias, parts, residual, total, out]
    launch(
        _join_norm, (T,),
        parts, bias, post_weight, residual, total, weight, norm_bias, out, T, float(eps),
        D=D, BLOCK=triton.next_power_of_2(D), S=1 if parts is None else parts.shape[0], UPCAST=INTERPRETED,
        num_warps=warps_of(D),
        bytes=sum(x.numel() * x.element_size() for x in moved if x is not None),
    )  # fmt: skip


def norm(
    x: Tensor, weight: Tensor | None, out: Tensor, eps: float, bias: Tensor | None = None, groups: int = 1
) -> None:
    """rms_norm(x) * weight or, with a bias, layer_norm(x) * weight + bias; for norms of heads among others.

    x: [rows, D] of any float type, whose rows may lie apart. weight: [D]; None: rms_norm(x). bias: [D]. out: [rows, D],
    contiguous, of any float type; may be x. groups: with several, weight is [groups * D], and row i is of group i %
    groups; without bias.
    """
    assert groups == 1 or (bias is None and weight is not None)
    rows, D = x.shape
    assert D <= MOST_WIDTH and x.stride(1) == 1 and out.is_contiguous()
    launch(
        _norm, (rows,),
        x, weight, bias, out, float(eps), x.stride(0),
        D=D, GROUPS=groups, BLOCK=triton.next_power_of_2(D), UPCAST=INTERPRETED, num_warps=warps_of(D),
        bytes=rows * D * (x.element_size() + out.element_size()),
    )  # fmt: skip


def warps_of(D: int) -> int:
    """The warps that compute a row of D values: up to 8 values per thread, and 16 warps at most."""
    return min(16, max(1, triton.next_power_of_2(D) // 256))
