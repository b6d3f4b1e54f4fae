"""Arithmetic whose bits depend on the operands alone: not on threads, batch, vector width, device or library.

IEEE additions, multiplications and divisions give the same bits everywhere, and separate torch calls are
never fused into a multiply-add. `exp` and `log` are therefore made of nothing else, in float64: the body and
the tail of a vectorised loop differ in library functions, but not in these. Sums over the vocabulary are sums
of integers (64-bit fixed point), so their order does not matter. Maxima and minima are exact in any order.

Letters: R rows, V vocabulary, K listed tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FRACTION_BITS = 40  # of a weight; 2^22 tokens of weight 1 fit an int64
MAX_VOCAB = 1 << (62 - FRACTION_BITS)

# ln 2 as a sum: the first part has 21 trailing zero bits, so that its product with an exponent is exact.
LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
LOG2_E = float.fromhex("0x1.71547652b82fep+0")
SQRT_HALF_BITS = 0x3FE6A09E667F3BCD  # of the float64
EXPONENT_BIAS = 1023
MANTISSA_BITS = 52

# Taylor for |r| <= ln(2)/2, the odd series of artanh for |s| <= 0.172: what is left out is below 1e-11 and 1e-16.
EXP_TERMS = [1.0 / math.factorial(i) for i in range(9, -1, -1)]
LOG_TERMS = [1.0 / (2 * i + 1) for i in range(9, -1, -1)]

PIECE = 1 << 15  # elements summed at a time on a CPU, so that what is between stays in its cache


def _horner(x: Tensor, terms: list[float]) -> Tensor:
    """The polynomial with these coefficients, highest power first."""
    result = x * terms[0]
    for term in terms[1:-1]:
        result.add_(term).mul_(x)
    return result.add_(terms[-1])


def weights(z: Tensor) -> Tensor:
    """e^z of float64 z <= 0, -inf included, as int64 in units of 2^-40: e^z to a relative 1e-11, then rounded."""
    z = z.clamp_min(-30.0)  # e^-30 is a tenth of the unit
    n = (z * LOG2_E).round_()
    r = z.sub_(n * LN2_HIGH).sub_(n * LN2_LOW)
    exponent = n.to(torch.int64).add_(EXPONENT_BIAS + FRACTION_BITS)
    return (
        _horner(r, EXP_TERMS)
        .mul_(exponent.bitwise_left_shift_(MANTISSA_BITS).view(torch.float64))
        .round_()
        .long()
    )


def log(x: Tensor) -> Tensor:
    """ln x of a float64 tensor of positive normal numbers, to a relative 1e-15 or so, near 1 as well."""
    bits = x.view(torch.int64)
    n = (bits - SQRT_HALF_BITS) >> MANTISSA_BITS
    # x = 2^n * (1 + f) with 1 + f between sqrt(1/2) and sqrt(2)
    f = (bits - (n << MANTISSA_BITS)).view(torch.float64).sub_(1.0)
    s = f / (f + 2.0)
    series = _horner(s * s, LOG_TERMS).mul_(s).mul_(2.0)
    n = n.double()
    return series.add_(n * LN2_LOW).add_(n * LN2_HIGH)


def centred(x: Tensor, peak: Tensor) -> Tensor:
    """x - peak in float64, peak being the row's maximum (shape of x with a last dimension of 1): at most 0.

    Where the peak is +inf, tokens at +inf get 0 and all others -inf: they share all the probability.
    """
    return torch.where(x == peak, 0.0, x.double() - peak.double())


def total_weight(x_RV: Tensor, peak_R1: Tensor, scale_R1: Tensor | float = 1.0) -> Tensor:
    """[R, 1] int64: the sum of the weights of (x - peak) * scale over each row."""
    total_R1 = torch.zeros_like(peak_R1, dtype=torch.int64)
    width = max(1, PIECE // len(x_RV)) if x_RV.device.type == "cpu" else x_RV.shape[1]
    for x in x_RV.split(width, dim=1):
        total_R1 += weights(centred(x, peak_R1).mul_(scale_R1)).sum(-1, keepdim=True)
    return total_R1


def log_weight(weight: Tensor) -> Tensor:
    """ln of positive int64 weights, float64."""
    return log(weight.double() * 2.0**-FRACTION_BITS)


def first_at(x_RV: Tensor, peak_R1: Tensor) -> Tensor:
    """[R] int64: the lowest id whose value is the peak; V where there is none (a NaN in the row)."""
    ids = torch.arange(x_RV.shape[-1], device=x_RV.device, dtype=torch.int32)
    return torch.where(x_RV == peak_R1, ids, x_RV.shape[-1]).amin(-1).long()


def best_ids(x_RV: Tensor, k: int) -> Tensor:
    """[R, k] int64: ids of the k greatest of each row of float32, descending, ties by ascending id.

    torch leaves the order of ties open, so what is selected are integers without ties: the float's bits made
    to ascend as a signed number, above the complement of the id. Adding 0 makes -0 equal to 0.
    """
    bits = (x_RV + 0.0).view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(x_RV.shape[-1], device=x_RV.device)
    keys = bits.long().bitwise_left_shift_(32).add_(0x7FFFFFFF - ids)
    return keys.topk(k, dim=-1, sorted=True).indices
