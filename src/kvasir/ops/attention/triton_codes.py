"""Device functions for keys and values that a cache stores as codes: a byte per number, and a float32 scale per token
and head.

    codes           numbers                     the scale of a row
    int8 tensor     -127 to 127                 its greatest magnitude / 127
    uint8 tensor    bits of e4m3fn, to 448      its greatest magnitude / 448

A number is its code's times the scale. A row of zeros has the scale 0. A row with NaN or an infinity has the scale NaN,
so whatever attends to it becomes NaN. Every byte is decoded as a finite number: also 127 and 255, which are NaN in
e4m3fn.

Codes are rounded to nearest even, with integers and with sums and divisions that IEEE 754 defines, so every machine
and the interpreter have the same bits. e4m3fn itself would need sm_89 or newer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


def checked_scales(
    scales: tuple[Tensor, Tensor] | None, k_cache: Tensor, v_cache: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The scales of keys and of values, float32 [blocks, K, block size], as kernels take them; None without codes."""
    caches = k_cache, v_cache
    if scales is None:
        assert all(cache.dtype.is_floating_point for cache in caches), "codes have scales"
        return None, None
    for cache, own in zip(caches, scales, strict=True):
        blocks, size, heads, _ = cache.shape
        assert cache.element_size() == 1 and own.shape == (blocks, heads, size) and own.is_contiguous()
    return scales


@triton.jit
def quantized(x, mask, CODE: tl.constexpr):
    """The codes of a row of float32 values, and their scale. mask: the lanes of the row. CODE: tl.int8, or tl.uint8 for
    e4m3fn."""
    LIMIT: tl.constexpr = 127.0 if tl.int8 == CODE else 448.0
    # as integers, magnitudes have the order of floats, and NaN is the greatest
    top = tl.max(tl.where(mask, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0), 0)
    scale = tl.div_rn(top.to(tl.float32, bitcast=True), LIMIT)
    scale = tl.where(top < 0x7F800000, scale, float("nan"))
    # subnormal scales are coarse, so that ratios may exceed the limit
    ratio = tl.div_rn(x, tl.where(scale == 0.0, 1.0, scale))
    ratio = tl.minimum(tl.maximum(ratio, -LIMIT), LIMIT)
    if tl.int8 == CODE:
        # adding 1.5 * 2^23 leaves the rounded integer in the last bits
        return ((ratio + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8), scale
    else:
        bits = ratio.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        # below 2^-6, multiples of 2^-9, the last bit of floats from 2^14 on
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
        return code.to(tl.uint8), scale


@triton.jit
def decoded(codes, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """The numbers of codes, without their scales, as an operand of tl.dot: of DTYPE, or of float32 if UPCAST. They are
    exact in either."""
    if codes.dtype == tl.int8:
        return codes.to(tl.float32 if UPCAST else DTYPE)
    # extended to the left, the sign lies above the exponent's top bits, which the mask clears
    signed = codes.to(tl.int8, bitcast=True)
    if UPCAST or tl.float32 == DTYPE:
        return ((signed.to(tl.int32) << 20) & -0x78100000).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    elif tl.bfloat16 == DTYPE:
        return ((signed.to(tl.int16) << 4) & -0x7810).to(tl.bfloat16, bitcast=True) * 1.329227995784916e36
    else:
        return ((signed.to(tl.int16) << 7) & -0x4080).to(tl.float16, bitcast=True) * 256.0
