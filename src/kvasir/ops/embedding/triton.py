"""The Triton kernel of table lookups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kvasir.ops.launch import launch
from kvasir.ops.linear.triton import DeviceMatrix

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1024


@triton.jit
def _lookup(ids, data, out, scale, N, D, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + t + tl.zeros_like(d)).to(tl.int64)  # a vector: the interpreter's masks are not scalars
    inside = (d < D) & (row >= 0) & (row < N)
    values = tl.load(data + row * D + d, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        values = values * scale
    tl.store(out + t * D + d, values, mask=d < D)


def lookup(ids: Tensor, weight: DeviceMatrix, out: Tensor, scale: float | None = None) -> None:
    """out = scale * the rows of the table, float32 [T, D]. ids: int32 or int64 [T]; rows for ids outside the table are
    zeros."""
    rows, width = weight.shape
    block = min(BLOCK, triton.next_power_of_2(width))
    launch(
        _lookup,
        (len(ids), triton.cdiv(width, block)),
        *(ids, weight.data, out, 1.0 if scale is None else scale, rows, width),
        SCALED=scale is not None,
        BLOCK=block,
        bytes=len(ids) * (weight.nbytes // rows + 4 * width + ids.element_size()),
    )
