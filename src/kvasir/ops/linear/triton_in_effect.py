"""Which adapters are in effect in each row of a step, found on the device.

Adapters are found through tables in device memory, so setting or removing one changes no launch:

    tables   int64 [adapters, TABLE_FIELDS]: the address of an adapter's entries, 0 for none; SCALES, or 0
    entries  int64 [places, ENTRY_FIELDS], zeros for a place that the adapter leaves alone:

        A, B, RANK    of a low-rank change: addresses of float32 [rank, K] and [N, rank], and the rank
        BIAS          float32 [N], added with the scale of the request
        FACTOR        float32 [N], of the product with its change (DoRA)
        ROWS, PLACES  rows [.., K] that replace those of the matrix, and for each of its N rows the place of the one
                      that replaces it, int32 [N], -1 for none; without PLACES row n replaces row n
        SHIFT         float32 [N], added last: what the adapter's own bias adds to the model's

Addresses are multiples of 16 bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from kvasir.ops.kernels import begin
from kvasir.ops.launch import launch

if TYPE_CHECKING:
    from torch import Tensor

LEVELS = 8  # adapters of a row, at most
ROW_FIELDS = 3
TABLE_FIELDS, ENTRY_FIELDS = 2, 8
A, B, RANK, BIAS, FACTOR, ROWS, PLACES, SHIFT = range(ENTRY_FIELDS)
SCALES = 256  # flag of an adapter that does more to products than to add to them; above all numbers of levels
_BLOCK = 128


class InEffect(NamedTuple):
    """The adapters of rows. adapters_TL: ids, int32 [T, LEVELS], in the order in which they apply, then 0. scales_TL:
    of the requests, float32. applied_T: int32, how many there are, and SCALES if one of them has that flag."""

    adapters_TL: Tensor
    scales_TL: Tensor
    applied_T: Tensor

    def rows(self, first: int, end: int) -> InEffect:
        return InEffect(*(part[first:end] for part in self))


@triton.jit
def entry_of(tables, adapter, place, FIELDS: tl.constexpr):
    """Where an adapter's entry of a place is, and whether it is there."""
    entries = tl.load(tables + adapter * 2)
    return entries.to(tl.pointer_type(tl.int64)) + place * FIELDS, entries != 0


@triton.jit
def field(entry, there, FIELD: tl.constexpr, DTYPE: tl.constexpr):
    """The address in a field of an entry, and whether it is set."""
    address = tl.load(entry + FIELD, mask=there, other=0)
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16), address != 0


@triton.jit(do_not_specialize=["count"])
def _find(
    at, rows_T, positions_T, adapters, tables, adapters_TL, scales_TL, applied_T, count,
    LEVELS: tl.constexpr, ROW_FIELDS: tl.constexpr, TABLE_FIELDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = i < count
    token = i
    if at is not None:
        token = tl.load(at + i, mask=real, other=0)
    row = tl.load(rows_T + token, mask=real, other=0).to(tl.int64)
    position = tl.load(positions_T + token, mask=real, other=0)
    number, flags = tl.zeros_like(i), tl.zeros_like(i)
    for level in tl.static_range(LEVELS):
        own = adapters + (row * LEVELS + level) * ROW_FIELDS
        adapter = tl.load(own, mask=real, other=0)
        applies = (adapter != 0) & (tl.load(own + 1, mask=real, other=0) <= position)
        scale = tl.load(own + 2, mask=real, other=0).to(tl.float32, bitcast=True)
        tl.store(adapters_TL + i * LEVELS + number, adapter, mask=applies)
        tl.store(scales_TL + i * LEVELS + number, scale, mask=applies)
        flags = flags | tl.load(tables + adapter * TABLE_FIELDS + 1, mask=applies, other=0).to(tl.int32)
        number += applies.to(tl.int32)
    for level in tl.static_range(LEVELS):
        tl.store(adapters_TL + i * LEVELS + level, tl.zeros_like(i), mask=real & (level >= number))
    tl.store(applied_T + i, number | flags, mask=real)


def find_in_effect(
    rows_T: Tensor, positions_T: Tensor, adapters: Tensor, tables: Tensor, found: InEffect, at: Tensor | None = None
) -> None:
    """Writes `found` for tokens by their rows and positions: those adapters of the row that start at or before the
    position.

    adapters: of the rows, int32 [rows, LEVELS, ROW_FIELDS]: id, 0 for none; first position; bits of the scale. at:
    int32 [T], the tokens; None for all in order.
    """
    count = len(found.applied_T)
    launch(
        _find, (triton.cdiv(count, _BLOCK),), at, rows_T, positions_T, adapters, tables, *found, count,
        LEVELS=LEVELS, ROW_FIELDS=ROW_FIELDS, TABLE_FIELDS=TABLE_FIELDS, BLOCK=_BLOCK, num_warps=4,
        bytes=4 * count * (3 + LEVELS * (ROW_FIELDS + 2)),
    )  # fmt: skip
