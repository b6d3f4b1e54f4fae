"""Arithmetic of the device's sampler: weights, logarithms, noise and orders, in the same IEEE operations as
`sampling/numerics.py`, `philox.py` and `gumbel.py`.

A key is an int32 in the order of float32 values; a place is an int64 in the order of tokens: by key, then by id.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from kvasir.sampling import device_layout as layout
from kvasir.sampling.rows import FRACTION_BITS

# Keys: int32 in the order of float32 values. A NaN's is the greatest.
KEY_OUTSIDE = tl.constexpr(-(2**31))  # of lanes beyond the vocabulary, below that of -inf
KEY_LOW = tl.constexpr(layout.KEY_LOW)
KEY_HIGH = tl.constexpr(0x7F800000)  # of +inf
KEY_NAN = tl.constexpr(layout.KEY_NAN)
# Places: int64, distinct, descending in the order of tokens: a key above the complement of the id.
NO_PLACE = tl.constexpr(-(2**63))
ID_BITS = tl.constexpr(0x7FFFFFFF)

# As in numerics.py and gumbel.py.
LN2_HIGH = tl.constexpr(float.fromhex("0x1.62e42fee00000p-1"))
LN2_LOW = tl.constexpr(float.fromhex("0x1.a39ef35793c76p-33"))
LOG2_E = tl.constexpr(float.fromhex("0x1.71547652b82fep+0"))
LN2 = tl.constexpr(math.log(2))
SQRT_HALF_BITS = tl.constexpr(0x3FE6A09E667F3BCD)
EXPONENT_BIAS = tl.constexpr(1023)
MANTISSA_BITS = tl.constexpr(52)
FRACTION = tl.constexpr(FRACTION_BITS)
UNIT = tl.constexpr(2.0**-FRACTION_BITS)
ROUNDING = tl.constexpr(1.5 * 2.0**52)
E9, E8, E7, E6, E5, E4, E3, E2, E1, E0 = (tl.constexpr(1.0 / math.factorial(i)) for i in range(9, -1, -1))
L9, L8, L7, L6, L5, L4, L3, L2, L1, L0 = (tl.constexpr(1.0 / (2 * i + 1)) for i in range(9, -1, -1))
SLACK = tl.constexpr(1e-9)
REACH = tl.constexpr(-33 * math.log(2) - 1e-9)


@triton.jit
def _horner(x, c9, c8, c7, c6, c5, c4, c3, c2, c1, c0):
    result = (x * c9 + c8) * x
    result = (result + c7) * x
    result = (result + c6) * x
    result = (result + c5) * x
    result = (result + c4) * x
    result = (result + c3) * x
    result = (result + c2) * x
    result = (result + c1) * x
    return result + c0


@triton.jit
def _rounded(x):
    """To the nearest integer, ties to even, of float64 below 2^51."""
    return (x + ROUNDING) - ROUNDING


@triton.jit
def weights_of(z):
    """e^z of float64 z <= 0 as int64 in units of 2^-40."""
    z = tl.maximum(z, -30.0)
    n = _rounded(z * LOG2_E)
    r = (z - n * LN2_HIGH) - n * LN2_LOW
    power = ((n.to(tl.int64) + (EXPONENT_BIAS + FRACTION)) << MANTISSA_BITS).to(tl.float64, bitcast=True)
    return _rounded(_horner(r, E9, E8, E7, E6, E5, E4, E3, E2, E1, E0) * power).to(tl.int64)


@triton.jit
def log_of(x):
    """ln x of positive normal float64 numbers."""
    bits = x.to(tl.int64, bitcast=True)
    n = (bits - SQRT_HALF_BITS) >> MANTISSA_BITS
    f = (bits - (n << MANTISSA_BITS)).to(tl.float64, bitcast=True) - 1.0
    s = f / (f + 2.0)
    series = _horner(s * s, L9, L8, L7, L6, L5, L4, L3, L2, L1, L0) * s * 2.0
    n = n.to(tl.float64)
    return (series + n * LN2_LOW) + n * LN2_HIGH


@triton.jit
def log_weight(weight):
    return log_of(weight.to(tl.float64) * UNIT)


@triton.jit
def mass_of(total, p):
    """The fraction p of int64 weights, rounded up, at least 1."""
    return tl.maximum(tl.ceil(total.to(tl.float64) * p).to(tl.int64), 1)


@triton.jit
def centred(x, peak):
    """x - peak in float64, at most 0."""
    x = tl.where(x == 0.0, 0.0, x).to(tl.float64)
    return tl.minimum(x - tl.minimum(peak.to(tl.float64), 1e300), 0.0)


@triton.jit
def key_of(x):
    """int32 in the order of float32 values; -0 as 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, KEY_NAN, key)


@triton.jit
def value_of(key):
    """The float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def place_of(key, ids):
    return (key.to(tl.int64) << 32) + (ids ^ ID_BITS)


@triton.jit
def key_at(place):
    return (place >> 32).to(tl.int32)


@triton.jit
def id_at(place):
    return (place & ID_BITS).to(tl.int32) ^ ID_BITS


@triton.jit
def _multiply(constant, x):
    """High and low word of the product of uint32 numbers."""
    product = x.to(tl.uint64) * constant
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def _philox(position, block, low, high):
    """The words of four neighbouring tokens, uint32, of the shape of `block`. low, high: of the seed."""
    c1 = block.to(tl.uint32)
    c0 = c1 * 0 + position.to(tl.uint32)
    c2 = c1 * 0
    c3 = c2
    k0 = c2 + low.to(tl.uint32)
    k1 = c2 + high.to(tl.uint32)
    first = tl.full(c1.shape, 0xD2511F53, tl.uint64)
    second = tl.full(c1.shape, 0xCD9E8D57, tl.uint64)
    golden = tl.full(c1.shape, 0x9E3779B9, tl.uint32)
    root = tl.full(c1.shape, 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = _multiply(first, c0)
        high1, low1 = _multiply(second, c2)
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 = k0 + golden
        k1 = k1 + root
    return c0, c1, c2, c3


@triton.jit
def words_from(position, start, low, high, N: tl.constexpr):
    """[N] words of the tokens from `start` on, a multiple of 4."""
    w0, w1, w2, w3 = _philox(position, start // 4 + tl.arange(0, N // 4), low, high)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def word_of(position, token, low, high):
    """[1] the word of one token."""
    w0, w1, w2, w3 = _philox(position, (token >> 2) + tl.zeros((1,), tl.int32), low, high)
    lane = token & 3
    return tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))


@triton.jit
def log_exponential(words):
    one_minus_u = (4294967295.5 - words.to(tl.int64).to(tl.float64)) * 2.3283064365386963e-10
    return log_of(-log_of(one_minus_u))


@triton.jit
def lower_bound(words):
    """Below log(e) of each word."""
    u = (words.to(tl.int64).to(tl.float64) + 0.5) * 2.3283064365386963e-10
    bits = u.to(tl.int64, bitcast=True).to(tl.float64)
    return (bits * 2.220446049250313e-16 - EXPONENT_BIAS) * LN2 - SLACK
