"""Triton kernels for rows that are divided into heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kvasir.ops.kernels import begin, rounded
from kvasir.ops.launch import INTERPRETED, launch

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024  # columns of a program


@triton.jit
def join_heads_kernel(
    a, b, out, HEADS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a row of `out`."""
    begin(PDL)
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width: tl.constexpr = HEADS * (A + B)
    head, column = columns // (A + B), columns % (A + B)
    mask, first = columns < width, column < A
    x = tl.load(a + row * HEADS * A + head * A + column, mask=mask & first, other=0.0)
    y = tl.load(b + row * HEADS * B + head * B + column - A, mask=mask & (column >= A), other=0.0)
    value = tl.where(first, x.to(tl.float32), y.to(tl.float32))
    tl.store(out + row * width + columns, rounded(value, out.dtype.element_ty, UPCAST), mask=mask)


def join_heads(a_THd: Tensor, b_THe: Tensor, out_THn: Tensor) -> None:
    """The dimensions of both for each head: [T, H, d] and [T, H, e] -> [T, H, d + e], rounded to the dtype of `out`."""
    rows, heads, width = out_THn.shape
    launch(
        join_heads_kernel, (rows, -(-heads * width // _BLOCK)), a_THd, b_THe, out_THn,
        HEADS=heads, A=a_THd.shape[2], B=b_THe.shape[2], BLOCK=_BLOCK, UPCAST=INTERPRETED, num_warps=4,
        bytes=rows * heads * width * (out_THn.element_size() + a_THd.element_size()),
    )  # fmt: skip
