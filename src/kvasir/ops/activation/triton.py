"""One Triton kernel for the elementwise ops on float32 values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kvasir.ops.kernels import activated, begin
from kvasir.ops.launch import launch

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1024


@triton.jit
def _elementwise(x, y, out, scalar, count, width, OP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    value = tl.load(x + at, mask=mask, other=0.0)
    if OP == "add":
        value = value + tl.load(y + at, mask=mask, other=0.0)
    elif OP == "multiply":
        value = value * tl.load(y + at, mask=mask, other=0.0)
    elif OP == "add_vector":
        value = value + tl.load(y + at % width, mask=mask, other=0.0)
    elif OP == "scale":
        value = value * scalar
    elif OP == "softcap":
        # tanh by exp of a number that is never positive
        t = value / scalar
        e = tl.exp(-2.0 * tl.abs(t))
        size = (1.0 - e) / (1.0 + e)
        value = scalar * tl.where(t < 0, -size, size)
    else:
        value = activated(value, OP)
    tl.store(out + at, value, mask=mask)


def elementwise(op: str, x: Tensor, y: Tensor | None, out: Tensor, scalar: float = 0.0) -> None:
    """out = op(x), op(x, y) or op(x, scalar), all float32 [T, D] and contiguous; out may be x.

    op: add, multiply; add_vector (y: [D]); scale, softcap (by the scalar); or a name that `kernels.activated` knows.
    """
    count = x.numel()
    launch(
        _elementwise, (triton.cdiv(count, BLOCK),), x, y, out, float(scalar), count, x.shape[-1],
        OP=op, BLOCK=BLOCK, num_warps=4, bytes=4 * count * (2 + (y is not None)),
    )  # fmt: skip
