"""The Triton kernel of table lookups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kvasir.ops.kernels import begin
from kvasir.ops.launch import launch
from kvasir.ops.linear.triton_decode import level, min_of, scale_of
from kvasir.ops.linear.triton_matrix import LAYOUTS, DeviceMatrix

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1024


@triton.jit
def _element(data, scales, mins, row, d, D, inside, FORMAT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Columns d of a row as float32, by the layouts of linear/triton_matrix."""
    if BITS == 0:
        value = tl.load(data + row * D + d, mask=inside, other=0.0).to(tl.float32)
    else:
        chunks = tl.cdiv(D, 128)
        FIELDS: tl.constexpr = 2 if BITS == 8 else 4
        HALF: tl.constexpr = 32 if GROUP == 32 else 64  # columns of one field
        within = d % (HALF * FIELDS)
        word = row * (chunks * 4 * BITS) + d // (HALF * FIELDS) * (HALF // 2) + within % HALF // 2
        shift = within // HALF * BITS + d % 2 * 16
        value = level(tl.load(data + word, mask=inside, other=0) >> shift, FORMAT)
        group = tl.zeros_like(d) if GROUP == 0 else d // GROUP
        groups = 1 if GROUP == 0 else chunks * (128 // GROUP)
        raw = tl.load(scales + row * groups + group, mask=inside, other=0)
        block = d
        if FORMAT == "Q4_K":
            block = tl.load(mins + row * (D // 256) + d // 256, mask=inside, other=0)
        value = value * scale_of(raw, block, FORMAT)
        if FORMAT == "Q4_K":
            value = value - min_of(raw, block)
    return value


@triton.jit
def _lookup(
    ids, data, scales, mins, out, scale, first, N, D, FORMAT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    SCALED: tl.constexpr, OR_FIRST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + t + tl.zeros_like(d)).to(tl.int64) - first  # a vector: the interpreter's masks are not scalars
    if OR_FIRST:
        row = tl.where((row >= 0) & (row < N), row, 0)
    inside = (d < D) & (row >= 0) & (row < N)
    values = _element(data, scales, mins, row, d, D, inside, FORMAT, BITS, GROUP)
    if SCALED:
        values = values * scale
    tl.store(out + t * D + d, tl.where(inside, values, 0.0), mask=d < D)


def lookup(
    ids: Tensor, weight: DeviceMatrix, out: Tensor, scale: float | None = None, or_first: bool = False, first: int = 0
) -> None:
    """out = scale * the rows of the table, float32 [T, D]. ids: int32 or int64 [T]; rows for ids outside the table are
    zeros, or with or_first its first row. first: the id of the table's first row."""
    rows, width = weight.shape
    block = min(BLOCK, triton.next_power_of_2(width))
    layout = LAYOUTS.get(weight.format)
    launch(
        _lookup,
        (len(ids), triton.cdiv(width, block)),
        *(ids, weight.data, weight.scales, weight.mins, out, 1.0 if scale is None else scale, first, rows, width),
        FORMAT=weight.format,
        BITS=layout.bits if layout else 0,
        GROUP=(layout.group or 0) if layout else 0,
        SCALED=scale is not None,
        OR_FIRST=or_first,
        BLOCK=block,
        bytes=len(ids) * (weight.nbytes // rows + 4 * width + ids.element_size()),
    )
