"""A Triton kernel for parts of rows."""

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
def take_columns_kernel(x, out, first, width, stride, UPCAST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Copies BLOCK columns of a row."""
    begin(PDL)
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * stride + first + columns, mask=columns < width, other=0.0)
    value = rounded(value.to(tl.float32), out.dtype.element_ty, UPCAST)
    tl.store(out + row * width + columns, value, mask=columns < width)


def take_columns(x_TN: Tensor, first: int, out_TM: Tensor) -> None:
    """The M columns from `first` on, rounded to the dtype of `out`. x: [T, N]. out: [T, M]. Both are contiguous."""
    rows, width = out_TM.shape
    launch(
        take_columns_kernel, (rows, -(-width // _BLOCK)), x_TN, out_TM, first, width, x_TN.stride(0),
        UPCAST=INTERPRETED, BLOCK=_BLOCK, num_warps=4,
        bytes=rows * width * (x_TN.element_size() + out_TM.element_size()),
    )  # fmt: skip
