"""The Triton kernel of norms whose weights adapters replace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kvasir.ops.kernels import begin, rounded
from kvasir.ops.launch import INTERPRETED, launch
from kvasir.ops.linear.triton_in_effect import ENTRY_FIELDS, LEVELS, ROWS, SCALES, SHIFT, InEffect, entry_of, field
from kvasir.ops.norm.triton import MOST_WIDTH, normed, warps_of

if TYPE_CHECKING:
    from torch import Tensor

_WEIGHT, _BIAS = tl.constexpr(ROWS), tl.constexpr(SHIFT)


@triton.jit(do_not_specialize=["place"])
def _change_norm(
    x, adapters_TL, applied_T, tables, out, place, eps, HEADS: tl.constexpr, D: tl.constexpr, BIASED: tl.constexpr,
    LEVELS: tl.constexpr, FIELDS: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    t = row // HEADS
    lanes = tl.arange(0, BLOCK)
    mask = lanes < D
    levels = tl.load(applied_T + t) % SCALES
    for level in range(0, levels):
        entry, there = entry_of(tables, tl.load(adapters_TL + t * LEVELS + level), place, FIELDS)
        weight, replaces = field(entry, there, _WEIGHT, tl.float32)
        if replaces:  # the last adapter that does writes last
            value = tl.load(x + row * D + lanes, mask=mask, other=0.0)
            if UPCAST:
                value = value.to(tl.float32)
            value = value.to(tl.float32)
            if BIASED:
                bias, _ = field(entry, there, _BIAS, tl.float32)
                value = normed(value, lanes, mask, weight, bias, eps, D)
            else:
                value = normed(value, lanes, mask, weight, None, eps, D)
            tl.store(out + row * D + lanes, rounded(value, out.dtype.element_ty, UPCAST), mask=mask)


def change_norm(
    x: Tensor, effect: InEffect, tables: Tensor, place: int, out: Tensor, eps: float, biased: bool = False
) -> None:
    """Computes the norm again, in `out`, for the rows of adapters that replace its weights, those of `place`.

    x: [T * heads, D] of any float type. out: of the same shape. biased: whether it is a LayerNorm, with a bias: an
    adapter that replaces one of both has both, float32 [D], in ROWS and SHIFT.
    """
    rows, D = x.shape
    assert D <= MOST_WIDTH and x.is_contiguous() and out.is_contiguous()
    launch(
        _change_norm, (rows,), x, effect.adapters_TL, effect.applied_T, tables, out, place, float(eps),
        HEADS=rows // len(effect.applied_T), D=D, BIASED=biased, LEVELS=LEVELS, FIELDS=ENTRY_FIELDS, SCALES=SCALES,
        BLOCK=triton.next_power_of_2(D), UPCAST=INTERPRETED, num_warps=warps_of(D),
        bytes=4 * rows,
    )  # fmt: skip
