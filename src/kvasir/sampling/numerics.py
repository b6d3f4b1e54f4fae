"""Arithmetic whose bits depend only on the operands: not on threads, batch, vector width, device or library.

IEEE additions, multiplications and divisions give the same bits everywhere, and separate torch calls are never fused
into a multiply-add. `exp` and `log` are therefore composed of these operations alone, in float64: in library functions
the body and the tail of a vectorised loop can differ. Sums over the vocabulary are sums of integers (64-bit fixed
point), so their order does not matter. Maxima and minima are exact in any order.

Letters: R rows, V vocabulary, K listed tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvasir.sampling.rows import FRACTION_BITS

# ln 2 as a sum: the first part has 21 trailing zero bits, so that its product with an exponent is exact.
LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
LOG2_E = float.fromhex("0x1.71547652b82fep+0")
SQRT_HALF_BITS = 0x3FE6A09E667F3BCD  # bits of the float64
EXPONENT_BIAS = 1023
MANTISSA_BITS = 52

# Truncation errors: below 1e-11 for Taylor with |r| <= ln(2)/2, below 1e-16 for artanh's odd series with |s| <= 0.172.
EXP_TERMS = [1.0 / math.factorial(i) for i in range(9, -1, -1)]
LOG_TERMS = [1.0 / (2 * i + 1) for i in range(9, -1, -1)]

PIECE = 1 << 15  # elements per chunk of a sum on a CPU, sized for its cache
RUN = 128  # most vocabulary sizes are multiples of it


def _horner(x: Tensor, terms: list[float]) -> Tensor:
    """The polynomial with these coefficients, highest power first."""
    result = x * terms[0]
    for term in terms[1:-1]:
        result.add_(term).mul_(x)
    return result.add_(terms[-1])


def weights(z: Tensor) -> Tensor:
    """e^z of float64 z <= 0, -inf included, as int64 in units of 2^-40: with a relative error of 1e-11, then
    rounded."""
    z = z.clamp_min(-30.0)  # e^-30 is a tenth of the unit
    n = (z * LOG2_E).round_()
    r = z.sub_(n * LN2_HIGH).sub_(n * LN2_LOW)
    exponent = n.to(torch.int64).add_(EXPONENT_BIAS + FRACTION_BITS)
    power_of_two = exponent.bitwise_left_shift_(MANTISSA_BITS).view(torch.float64)
    return _horner(r, EXP_TERMS).mul_(power_of_two).round_().long()


def log(x: Tensor) -> Tensor:
    """ln x of a float64 tensor of positive normal numbers, with a relative error of about 1e-15, also near 1."""
    bits = x.view(torch.int64)
    n = (bits - SQRT_HALF_BITS) >> MANTISSA_BITS
    # x = 2^n * (1 + f) with 1 + f between sqrt(1/2) and sqrt(2)
    f = (bits - (n << MANTISSA_BITS)).view(torch.float64).sub_(1.0)
    s = f / (f + 2.0)
    series = _horner(s * s, LOG_TERMS).mul_(s).mul_(2.0)
    n = n.double()
    return series.add_(n * LN2_LOW).add_(n * LN2_HIGH)


def centred(x: Tensor, peak: Tensor) -> Tensor:
    """x - peak in float64, at most 0. x: float32. peak: the maximum of each row, last dimension 1.

    If the peak is +inf, tokens at +inf get 0 and share all the probability; the others get at most -1e300.
    """
    return (x.double() - peak.double().clamp_max(1e300)).clamp_max_(0.0)


def total_weight(x_RV: Tensor, peak_R1: Tensor, scale_R1: Tensor | float = 1.0) -> Tensor:
    """[R, 1] int64: the sum of the weights of (x - peak) * scale over each row."""
    total_R1 = torch.zeros_like(peak_R1, dtype=torch.int64)
    width = max(1, PIECE // len(x_RV)) if x_RV.device.type == "cpu" else x_RV.shape[1]
    for x in x_RV.split(width, dim=1):
        total_R1 += weights(centred(x, peak_R1).mul_(scale_R1)).sum(-1, keepdim=True)
    return total_R1


def mass_of(total: Tensor, p: Tensor | float) -> Tensor:
    """The fraction p of int64 weights, rounded up, at least 1."""
    return (total.double() * p).ceil().long().clamp_min(1)


def log_weight(weight: Tensor) -> Tensor:
    """ln of positive int64 weights, float64."""
    return log(weight.double() * 2.0**-FRACTION_BITS)


def tree_sum(x_N: Tensor) -> Tensor:
    """[] the sum of float64 numbers by a fixed tree: pads to a power of two, then adds halves until one number is
    left."""
    size = 1 << max(0, len(x_N) - 1).bit_length()
    x_N = pad(x_N, (0, size - len(x_N)))
    while len(x_N) > 1:
        x_N = x_N[: len(x_N) // 2] + x_N[len(x_N) // 2 :]
    return x_N[0]


def entropy(z_N: Tensor) -> tuple[Tensor, Tensor]:
    """([], []) float64: ln of the total weight of z <= 0, and the entropy of e^z / total in nats."""
    weight_N = weights(z_N)
    # w * -z is at most 2^40 / e, so the sum over a whole vocabulary fits in an int64.
    surprise = (weight_N * z_N.clamp_min(-30.0).neg_()).round_().long().sum()
    total = weight_N.sum()
    log_total = log_weight(total)
    return log_total, log_total + surprise.double() / total.double()


def first_at(x_RV: Tensor, peak_R1: Tensor) -> Tensor:
    """[R] int64: the lowest id whose value is the peak, the row's maximum; unspecified if the peak is NaN.

    Computes maxima of runs of ids first, because an elementwise comparison is slower than a maximum.
    """
    num_rows, vocab = x_RV.shape
    if vocab % RUN:
        x_RV = pad(x_RV, (0, -vocab % RUN), value=-math.inf)
    x_RNn = x_RV.reshape(num_rows, -1, RUN)
    run_R = _first(x_RNn.amax(-1) == peak_R1)
    return run_R * RUN + _first(x_RNn[torch.arange(num_rows, device=x_RV.device), run_R] == peak_R1)


def _first(found_RN: Tensor) -> Tensor:
    """[R] int64: the index of the first True of each row; the last index if there is none."""
    places = torch.arange(found_RN.shape[1], device=found_RN.device)
    return torch.where(found_RN, places, found_RN.shape[1] - 1).amin(-1)


def best_ids(x_RV: Tensor, k: int) -> Tensor:
    """[R, k] int64: ids of the k largest values of each row of float32, descending, ties by ascending id.

    torch does not specify the order of ties, so this sorts unique integers: the float's bits, mapped to an
    order-preserving signed number, above the complement of the id. Adding 0 makes -0 equal to 0.
    """
    bits = (x_RV + 0.0).view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(x_RV.shape[-1], device=x_RV.device)
    keys = bits.long().bitwise_left_shift_(32).add_(0x7FFFFFFF - ids)
    return keys.topk(k, dim=-1, sorted=True).indices
