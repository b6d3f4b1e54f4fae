"""The Triton kernel of what adapters change in rows of a table: see layers/changes.change_lookup."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kvasir.ops.embedding.triton import BLOCK
from kvasir.ops.kernels import begin
from kvasir.ops.launch import launch
from kvasir.ops.linear.triton import DTYPES
from kvasir.ops.linear.triton_in_effect import (
    ENTRY_FIELDS,
    FACTOR,
    LEVELS,
    PLACES,
    RANK,
    ROWS,
    SCALES,
    A,
    B,
    InEffect,
    entry_of,
    field,
)

if TYPE_CHECKING:
    from torch import Tensor

_A, _B, _RANK, _FACTOR, _REPLACING, _PLACES = map(tl.constexpr, (A, B, RANK, FACTOR, ROWS, PLACES))


@triton.jit(do_not_specialize=["place"])
def _change_lookup(
    ids, adapters_TL, scales_TL, applied_T, tables, out, place, first, N, D, LEVELS: tl.constexpr, FIELDS: tl.constexpr,
    SCALES: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = d < D
    id = tl.load(ids + t).to(tl.int64) - first
    levels = tl.load(applied_T + t) % SCALES
    if (levels > 0) & (id >= 0) & (id < N):
        total = tl.load(out + t * D + d, mask=real, other=0.0)
        for level in range(0, levels):
            entry, there = entry_of(tables, tl.load(adapters_TL + t * LEVELS + level), place, FIELDS)
            rows, replaces = field(entry, there, _REPLACING, DTYPE)
            if replaces:
                places, some = field(entry, there, _PLACES, tl.int32)
                row = id
                if some:
                    row = tl.load(places + id).to(tl.int64)
                if row >= 0:
                    total = tl.load(rows + row * D + d, mask=real, other=0.0).to(tl.float32)
        for level in range(0, levels):
            entry, there = entry_of(tables, tl.load(adapters_TL + t * LEVELS + level), place, FIELDS)
            scale = tl.load(scales_TL + t * LEVELS + level)
            a, _ = field(entry, there, _A, tl.float32)
            b, _ = field(entry, there, _B, tl.float32)
            rank = tl.load(entry + _RANK, mask=there, other=0)
            for r in range(0, rank):
                total += tl.load(a + id * rank + r) * scale * tl.load(b + r * D + d, mask=real, other=0.0)
            factors, some = field(entry, there, _FACTOR, tl.float32)
            if some:
                total *= tl.load(factors + d, mask=real, other=0.0)
        tl.store(out + t * D + d, total, mask=real)


def change_lookup(
    ids: Tensor, effect: InEffect, tables: Tensor, place: int, out: Tensor, rows: int, dtype: str, first: int = 0
) -> None:
    """Changes looked-up rows, in place, as the adapters of the tokens change the table, whose number is `place`.

    An entry's A is transposed, float32 [rows, rank], so is B, [rank, D]. out: float32 [T, D], of `lookup`. rows: of the
    table. dtype: of rows that replace those of the table. first: the id of the table's first row.
    """
    count, width = out.shape
    block = min(BLOCK, triton.next_power_of_2(width))
    launch(
        _change_lookup, (count, triton.cdiv(width, block)), ids, *effect, tables, out, place, first, rows, width,
        LEVELS=LEVELS, FIELDS=ENTRY_FIELDS, SCALES=SCALES, DTYPE=DTYPES[dtype], BLOCK=block, num_warps=4,
        bytes=8 * count * width,
    )  # fmt: skip
