"""Device functions that several Triton kernels share."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(PDL: tl.constexpr):
    """The first statement of a kernel with the parameter PDL: it lets the next kernel start, and waits until the one
    before is complete. See `ops.launch`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def joined(parts, offsets, mask, stride, S: tl.constexpr):
    """The sum of the S segments of a product, by a balanced tree: float32 of the shape of `offsets`.

    parts: pointer to the first segment. stride: elements from one segment to the next. S: 1, 2, 4 or 8.
    """
    total = tl.load(parts + offsets, mask=mask, other=0.0)
    if S == 2:
        total = total + tl.load(parts + stride + offsets, mask=mask, other=0.0)
    if S >= 4:
        second = tl.load(parts + stride + offsets, mask=mask, other=0.0)
        third = tl.load(parts + 2 * stride + offsets, mask=mask, other=0.0)
        fourth = tl.load(parts + 3 * stride + offsets, mask=mask, other=0.0)
        total = (total + second) + (third + fourth)
    if S == 8:
        first = tl.load(parts + 4 * stride + offsets, mask=mask, other=0.0)
        second = tl.load(parts + 5 * stride + offsets, mask=mask, other=0.0)
        third = tl.load(parts + 6 * stride + offsets, mask=mask, other=0.0)
        fourth = tl.load(parts + 7 * stride + offsets, mask=mask, other=0.0)
        total = total + ((first + second) + (third + fourth))
    return total


@triton.jit
def part_of(item, PARTS: tl.constexpr, units):
    """The part of `parallel.cut(units, PARTS)` that an item is in."""
    return ((item + 1) * PARTS - 1) // units


@triton.jit
def activated(x, ACT: tl.constexpr):
    """An activation function of float32 values. ACT: a name of `ops.activation`, "" for none."""
    if ACT == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif ACT == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = 0.5 * x * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0))
    elif ACT == "relu":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == "sigmoid":
        x = 1.0 / (1.0 + tl.exp(-x))
    return x


@triton.jit
def rounded(x, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """Float32 values as DTYPE, rounded to nearest even. The interpreter would truncate to bfloat16."""
    if UPCAST and x.dtype == tl.float32 and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        x = tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)
