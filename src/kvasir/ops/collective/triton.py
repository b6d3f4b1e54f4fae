"""Triton kernels that combine what ranks have gathered. All read [ranks, ...] in the order of the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kvasir.ops.kernels import begin, part_of
from kvasir.ops.launch import launch

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.parallel import Cut

_BLOCK = 1024


@triton.jit
def _pick(everyones, ids, out, count, D, units, unit, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    part = tl.minimum(part_of(tl.load(ids + t) // unit, PARTS, units), PARTS - 1).to(tl.int64)
    value = tl.load(everyones + (part * count + t) * D + d, mask=d < D, other=0.0)
    tl.store(out + t * D + d, value, mask=d < D)


@triton.jit
def _side_by_side(everyones, out, first, width, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(everyones + t * width + n, mask=n < width, other=0.0)
    tl.store(out + t * N + first + n, value, mask=n < width)


def pick(everyones: Tensor, ids: Tensor, out: Tensor, table: Cut, unit: int) -> None:
    """out[t] = everyones[part of ids[t], t]. everyones: float32 [parts, T, D]. ids: int32 [T]. table: made by
    `parallel.cut` with this unit. out: float32 [T, D]."""
    parts, count, D = everyones.shape
    block = min(_BLOCK, triton.next_power_of_2(D))
    launch(
        _pick, (count, triton.cdiv(D, block)),
        everyones, ids, out, count, D, -(-table.size // unit), unit, PARTS=parts, BLOCK=block, bytes=8 * out.numel(),
    )  # fmt: skip


def side_by_side(everyones: Tensor, out: Tensor, columns: Cut) -> None:
    """out: float32 [T, columns.size], the columns of all parts. everyones: float32 [parts, any], of which part p begins
    with its own columns, [T, width of p]."""
    count, N = out.shape
    for part in range(columns.parts):
        first, last = columns.range(part)
        block = min(_BLOCK, triton.next_power_of_2(last - first))
        launch(
            _side_by_side, (count, triton.cdiv(last - first, block)),
            everyones[part], out, first, last - first, N, BLOCK=block, bytes=8 * count * (last - first),
        )  # fmt: skip
