"""Device functions that decode quantized weights; see triton_matrix for the layouts.

A weight is its level times its group's scale, minus the group's minimum. Levels are small integers or small floats:
exact in float32, float16 and bfloat16. They are decoded two at a time in 32-bit registers, into the bits of a float
whose last mantissa bits are the code, minus that float's own value.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def level(code, FORMAT: tl.constexpr):
    """The level of the code in the lowest bits, float32."""
    if FORMAT == "Q4_0":
        return ((code & 15) - 8).to(tl.float32)
    elif FORMAT == "Q4_K":
        return (code & 15).to(tl.float32)
    elif FORMAT == "MXFP4":  # E2M1: its exponent as the last bits of a float32's, times 2^126
        return ((code & 7) << 22 | (code & 8) << 28).to(tl.float32, bitcast=True) * 8.507059173023462e37
    elif FORMAT == "F8_BLOCK" or FORMAT == "F8_ROW":  # E4M3, times 2^120
        return ((code & 127) << 20 | (code & 128) << 24).to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        return (((code & 255) ^ 128) - 128).to(tl.float32)


@triton.jit
def scale_of(raw, block, FORMAT: tl.constexpr):
    """The scale of a group, float32. raw: its element of `scales`; block: of `mins`, for Q4_K."""
    if FORMAT == "MXFP4":  # E8M0; the least one is subnormal
        exponent = raw.to(tl.int32)
        return tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
    elif FORMAT == "Q4_K":
        return (raw & 255).to(tl.float32) * _half(block)
    else:
        return raw.to(tl.float32)


@triton.jit
def min_of(raw, block):
    """The minimum of a group of Q4_K, float32."""
    return (raw >> 8).to(tl.float32) * _half(block >> 16)


@triton.jit
def _half(bits):
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def levels(
    words, SHIFT: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """The levels at bits SHIFT and SHIFT + 16 of words [ROWS, WORDS]: [ROWS, 2 * WORDS] of
    DTYPE, or of float32 if UPCAST."""
    if tl.float32 == DTYPE:
        return _joined(level(words >> SHIFT, FORMAT), level(words >> (SHIFT + 16), FORMAT), ROWS, WORDS)
    else:  # what follows a `return` is compiled, too
        return _narrow(words >> SHIFT, FORMAT, DTYPE, ROWS, WORDS, UPCAST)


@triton.jit
def _narrow(
    codes, FORMAT: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, UPCAST: tl.constexpr
):
    """`levels` as 16-bit floats. codes: at bits 0 and 16."""
    if FORMAT == "MXFP4":
        if tl.bfloat16 == DTYPE:
            return _pairs((codes & 0x00070007) << 6 | (codes & 0x00080008) << 12, DTYPE, ROWS, WORDS, UPCAST) * 2.0**126
        else:
            return _pairs((codes & 0x00070007) << 9 | (codes & 0x00080008) << 12, DTYPE, ROWS, WORDS, UPCAST) * 2.0**14
    elif FORMAT == "F8_BLOCK" or FORMAT == "F8_ROW":
        if tl.bfloat16 == DTYPE:
            return _pairs((codes & 0x007F007F) << 4 | (codes & 0x00800080) << 8, DTYPE, ROWS, WORDS, UPCAST) * 2.0**120
        else:
            return _pairs((codes & 0x007F007F) << 7 | (codes & 0x00800080) << 8, DTYPE, ROWS, WORDS, UPCAST) * 2.0**8
    elif FORMAT == "Q8_0" or FORMAT == "I8_ROW":
        if tl.bfloat16 == DTYPE:  # 7 bits from 128 on; the sign bit makes 128 into 256
            low = _pairs(codes & 0x007F007F | 0x43004300, DTYPE, ROWS, WORDS, UPCAST)
            return low - _pairs(codes & 0x00800080 | 0x43004300, DTYPE, ROWS, WORDS, UPCAST)
        else:
            return _pairs(((codes & 0x00FF00FF) ^ 0x00800080) | 0x64006400, DTYPE, ROWS, WORDS, UPCAST) - 1152.0
    else:
        zero: tl.constexpr = 8.0 if FORMAT == "Q4_0" else 0.0
        if tl.bfloat16 == DTYPE:
            return _pairs(codes & 0x000F000F | 0x43004300, DTYPE, ROWS, WORDS, UPCAST) - (128.0 + zero)
        else:
            return _pairs(codes & 0x000F000F | 0x64006400, DTYPE, ROWS, WORDS, UPCAST) - (1024.0 + zero)


@triton.jit
def _pairs(bits, DTYPE: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, UPCAST: tl.constexpr):
    """The halves of words as 16-bit floats, or bfloat16 as float32 if UPCAST."""
    if UPCAST and tl.bfloat16 == DTYPE:  # the upper halves of float32; the interpreter's own cast breaks subnormals
        low = (bits << 16).to(tl.float32, bitcast=True)
        high = (bits >> 16 << 16).to(tl.float32, bitcast=True)
    else:
        low = bits.to(tl.int16).to(DTYPE, bitcast=True)
        high = (bits >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return _joined(low, high, ROWS, WORDS)


@triton.jit
def _joined(low, high, ROWS: tl.constexpr, WORDS: tl.constexpr):
    return tl.reshape(tl.join(low, high), (ROWS, 2 * WORDS))
