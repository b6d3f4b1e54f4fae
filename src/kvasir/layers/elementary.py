"""Elementary functions with the same bits on every machine; libm's results may differ in the last bit.

`power` and `log` round the exact value correctly (decimal arithmetic does so on every machine); they are slow, and used
only for a few settings of a model. `sin_cos` uses only IEEE additions and multiplications, and is fast enough for
tables.
"""

from __future__ import annotations

import math
from decimal import ROUND_HALF_EVEN, Context, Decimal

import numpy as np

_DIGITS = Context(prec=50, rounding=ROUND_HALF_EVEN)

# pi / 2 as a sum. The first three terms have 22 bits each, so that their products with an integer below 2^31 are exact.
_HALF_PI = tuple(map(float.fromhex, ("0x1.921fbp+0", "0x1.5110bp-22", "0x1.184698p-44", "0x1.3198a2e037073p-69")))
MAX_ANGLE = 2.0**31

# Taylor series for |r| <= pi/4; truncation error below 1e-19 for sin r / r, 2e-18 for cos r. Highest power first.
_SIN_TERMS = [(-1) ** i / math.factorial(2 * i + 1) for i in range(8, 0, -1)]
_COS_TERMS = [(-1) ** i / math.factorial(2 * i) for i in range(8, 0, -1)]

_PIECE = 1 << 13  # angles per chunk, sized for a core's cache


def log(x: float) -> float:
    """ln x, x > 0."""
    return float(_DIGITS.ln(Decimal(x)))


def softplus(x: float) -> float:
    """ln(1 + e^x), |x| below 1000."""
    return float(_DIGITS.ln(_DIGITS.add(1, _DIGITS.exp(Decimal(x)))))


def power(base: float, over: int, under: int) -> float:
    """base^(over / under), base > 0."""
    exponent = _DIGITS.divide(_DIGITS.multiply(_DIGITS.ln(Decimal(base)), Decimal(over)), Decimal(under))
    return float(_DIGITS.exp(exponent))


def sin_cos(angles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """sin and cos of float64 radians, to 2e-16. Raises ValueError if an angle's magnitude is MAX_ANGLE or more."""
    if not (np.abs(angles) < MAX_ANGLE).all():
        raise ValueError(f"an angle of {MAX_ANGLE:.0f} radians or more")
    sin, cos = np.empty(angles.shape), np.empty(angles.shape)
    flat, flat_sin, flat_cos = angles.reshape(-1), sin.reshape(-1), cos.reshape(-1)
    for at in range(0, flat.size, _PIECE):
        piece = slice(at, at + _PIECE)
        flat_sin[piece], flat_cos[piece] = _sin_cos(flat[piece])
    return sin, cos


def _sin_cos(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x = n * pi/2 + r (Cody and Waite, 1980): evaluates polynomials of r, then selects by quadrant."""
    n = np.rint(x * (2.0 / math.pi))
    r = x
    for part in _HALF_PI:
        r = r - n * part
    square = r * r
    sin = r + r * (square * _horner(square, _SIN_TERMS))
    cos = 1.0 + square * _horner(square, _COS_TERMS)
    quadrant = n.astype(np.int64) & 3
    odd = (quadrant & 1).astype(bool)
    sin_x, cos_x = np.where(odd, cos, sin), np.where(odd, sin, cos)
    return np.where(quadrant >= 2, -sin_x, sin_x), np.where((quadrant + 1) & 2, -cos_x, cos_x)


def _horner(x: np.ndarray, terms: list[float]) -> np.ndarray:
    result = np.full_like(x, terms[0])
    for term in terms[1:]:
        result = result * x + term
    return result
