"""Triton kernels of what adapters change in products of matrices: see `low_rank` and layers/changes.

    shrink   inner = A x, [S, levels, T, rank], by segments of x's columns
    grow     factor and delta, which the products of ops/linear/triton apply to their own: y = factor * W x + delta

Grow follows a row's adapters in their order: rows of W that an adapter replaces have the factor 0, and the delta is
their product; then each adapter in turn adds B (scale * (the sum of the segments)) and scale * bias to the delta, and
multiplies both by its factor; at last the delta gets what replaces the model's own bias.

Rows of one step may have different adapters, of different ranks. A program computes with 16 rows: for each adapter
among them a tile of its own, whose result it keeps for the rows of that adapter. All sums are float32, in an order that
depends on nothing but the matrices' shapes: ascending over the columns of a segment, over segments, and over ranks.
How kernels find matrices: see triton_in_effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from kvasir.ops.kernels import begin
from kvasir.ops.launch import INTERPRETED, for_large_tiles, launch, on_hip
from kvasir.ops.linear.triton import DTYPES, _dot, _inputs
from kvasir.ops.linear.triton_in_effect import ENTRY_FIELDS, LEVELS, SCALES, InEffect, entry_of, field

if TYPE_CHECKING:
    from torch import Tensor

MAX_PARTS = 3  # matrices of one launch
MAX_RANK = 256
_ROWS = 16  # token rows of a program, and ranks of a tile
_STEP = 64  # columns per step of a sum
_SEGMENT, _MAX_SEGMENTS = 512, 16  # columns that are worth a program of their own; most segments
_FEW = 64  # rows up to which several programs share the work of a tile, to fill more of the device
# Fields of an entry, in the order of triton_in_effect.
_A, _B, _RANK, _BIAS, _FACTOR, _REPLACING, _PLACES, _SHIFT = map(tl.constexpr, range(ENTRY_FIELDS))


def split(cols: int) -> tuple[int, int]:
    """The number of segments of a sum over `cols` columns, and the columns of each but the last."""
    segments = min(_MAX_SEGMENTS, max(1, cols // _SEGMENT))
    width = triton.cdiv(triton.cdiv(cols, segments), _STEP) * _STEP
    return triton.cdiv(cols, width), width


@triton.jit
def _distinct(mine):
    """For the first row of each adapter its number in order of appearance, -1 for the other rows; how many adapters
    there are. mine: the adapters of the rows, 0 for none."""
    i = tl.arange(0, mine.shape[0])
    before = i[None, :] < i[:, None]
    again = tl.sum((before & (mine[None, :] == mine[:, None])).to(tl.int32), axis=1)
    opens = (mine != 0) & (again == 0)
    number = tl.sum((before & opens[None, :]).to(tl.int32), axis=1)
    return tl.where(opens, number, -1), tl.sum(opens.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["count", "place"])
def _shrink(
    x, x_stride, adapters_TL, applied_T, tables, inner, count, place, K, width, S: tl.constexpr,
    LEVELS: tl.constexpr, FIELDS: tl.constexpr, SCALES: tl.constexpr, MAX_RANK: tl.constexpr, WORKERS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    worker, seat = tl.program_id(1), tl.program_id(2)
    part, s = seat // S, seat % S
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    levels = tl.max(tl.load(applied_T + t, mask=t < count, other=0) % SCALES, axis=0)
    first = s * width
    last = tl.minimum(first + width, K)
    done = 0  # tiles of ranks of the adapters so far; every WORKERS-th is this program's
    for level in range(0, levels):
        mine = tl.load(adapters_TL + t * LEVELS + level, mask=t < count, other=0)
        order, number = _distinct(mine)
        for j in range(0, number):
            adapter = tl.sum(tl.where(order == j, mine, 0), axis=0)
            entry, there = entry_of(tables, adapter, place + part, FIELDS)
            a, _ = field(entry, there, _A, tl.float32)
            rank = tl.load(entry + _RANK, mask=there, other=0).to(tl.int32)
            own = mine == adapter
            blocks = tl.cdiv(rank, BLOCK_R)
            for block in range((worker + WORKERS - done % WORKERS) % WORKERS, blocks, WORKERS):
                r = block * BLOCK_R + tl.arange(0, BLOCK_R)
                real = r < rank
                acc = tl.zeros((BLOCK_R, BLOCK_T), tl.float32)
                for k in tl.range(first, last, BLOCK_K):
                    columns = k + tl.arange(0, BLOCK_K)
                    a_mask, x_mask = real[:, None], own[None, :]
                    if not EVEN:
                        a_mask, x_mask = a_mask & (columns < last)[None, :], x_mask & (columns < last)[:, None]
                    w = tl.load(a + (r * K)[:, None] + columns[None, :], mask=a_mask, other=0.0)
                    at = x + t.to(tl.int64)[None, :] * x_stride + columns[:, None]
                    rows = tl.load(at, mask=x_mask, other=0.0).to(tl.float32)
                    acc = tl.dot(w, rows, acc, input_precision="ieee")
                out = inner + ((seat * LEVELS + level).to(tl.int64) * count + t)[None, :] * MAX_RANK + r[:, None]
                tl.store(out, acc, mask=real[:, None] & own[None, :])
            done += blocks


@triton.jit
def _replaced(
    delta, factor, entry, there, x, x_stride, t, own, n, real, K, DTYPE: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The delta and the factor after an adapter's rows have replaced those of the matrix."""
    rows, replaces = field(entry, there, _REPLACING, DTYPE)
    if replaces:
        places, some = field(entry, there, _PLACES, tl.int32)
        row = n
        if some:
            row = tl.load(places + n, mask=real, other=-1)
        hit = real & (row >= 0)
        if tl.max(hit.to(tl.int32), axis=0) > 0:
            acc = tl.zeros_like(delta)
            for k in tl.range(0, K, BLOCK_K):
                columns = k + tl.arange(0, BLOCK_K)
                mask = hit[:, None]
                if not EVEN:
                    mask = mask & (columns < K)[None, :]
                w = tl.load(rows + (row.to(tl.int64) * K)[:, None] + columns[None, :], mask=mask, other=0.0)
                inputs = _inputs(x, t * x_stride, own, k, K, DTYPE, BLOCK_K, EVEN, UPCAST)
                acc = _dot(w, inputs, acc, UPCAST)
            both = hit[:, None] & own[None, :]
            delta, factor = tl.where(both, acc, delta), tl.where(both, 0.0, factor)
    return delta, factor


@triton.jit
def _changed(
    delta, factor, shift, entry, there, inner, scale, t, own, n, real,
    count, seat, S: tl.constexpr, LEVELS: tl.constexpr, MAX_RANK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The delta, the factor and the shift after an adapter's low-rank change. inner: of the first segment at its level.
    scale: of the rows."""
    b, _ = field(entry, there, _B, tl.float32)
    rank = tl.load(entry + _RANK, mask=there, other=0).to(tl.int32)
    acc = delta
    for first in tl.range(0, rank, BLOCK_R, num_stages=1):
        r = first + tl.arange(0, BLOCK_R)
        w = tl.load(b + (n * rank)[:, None] + r[None, :], mask=real[:, None] & (r < rank)[None, :], other=0.0)
        total = tl.zeros((BLOCK_R, delta.shape[1]), tl.float32)
        for s in range(0, S):
            at = inner + ((seat + s * LEVELS).to(tl.int64) * count + t)[None, :] * MAX_RANK + r[:, None]
            total = total + tl.load(at, mask=(r < rank)[:, None] & own[None, :], other=0.0)
        acc = tl.dot(w, total * scale[None, :], acc, input_precision="ieee")
    bias, some = field(entry, there, _BIAS, tl.float32)
    if some:
        acc += tl.load(bias + n, mask=real, other=0.0)[:, None] * scale[None, :]
    factors, some = field(entry, there, _FACTOR, tl.float32)
    if some:
        times = tl.load(factors + n, mask=real, other=0.0)[:, None]
        acc *= times
        factor = tl.where(own[None, :], factor * times, factor)
    shifts, some = field(entry, there, _SHIFT, tl.float32)
    if some:
        shift = tl.where(own[None, :], tl.load(shifts + n, mask=real, other=0.0)[:, None], shift)
    return tl.where(own[None, :], acc, delta), factor, shift


@triton.jit(do_not_specialize=["count", "place"])
def _grow(
    x, x_stride, inner, adapters_TL, scales_TL, applied_T, tables, delta, factors, count, place, n0, n1, n2, stride,
    offset1, offset2, K, S: tl.constexpr, LEVELS: tl.constexpr, FIELDS: tl.constexpr, SCALES: tl.constexpr,
    MAX_RANK: tl.constexpr, DTYPE: tl.constexpr, WORKERS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    part, worker = tl.program_id(2) // WORKERS, tl.program_id(2) % WORKERS
    N = tl.where(part == 0, n0, tl.where(part == 1, n1, n2))
    offset = tl.where(part == 0, 0, tl.where(part == 1, offset1, offset2))
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    real = n < N
    applied = tl.load(applied_T + t, mask=t < count, other=0)
    levels, flags = tl.max(applied % SCALES, axis=0), tl.max(applied // SCALES, axis=0)
    if (tl.program_id(0) * BLOCK_N < N) & (levels > 0):
        # The number that changes no other one by its addition; a literal would become a positive zero.
        nothing = tl.full((BLOCK_N, BLOCK_T), -(2**31), tl.int32).to(tl.float32, bitcast=True)
        total, factor, shift = nothing, tl.full((BLOCK_N, BLOCK_T), 1.0, tl.float32), nothing
        # Every WORKERS-th of the first adapters, with all adapters of its rows, is this program's.
        mine = tl.load(adapters_TL + t * LEVELS, mask=t < count, other=0)
        order, number = _distinct(mine)
        group = tl.max(tl.where(mine[None, :] == mine[:, None], order[None, :], -1), axis=1)
        keep = (mine != 0) & (group % WORKERS == worker)
        for level in range(0, tl.where(flags > 0, levels, 0)):
            mine = tl.load(adapters_TL + t * LEVELS + level, mask=keep, other=0)
            order, number = _distinct(mine)
            for j in range(0, number):
                adapter = tl.sum(tl.where(order == j, mine, 0), axis=0)
                entry, there = entry_of(tables, adapter, place + part, FIELDS)
                total, factor = _replaced(
                    total, factor, entry, there, x, x_stride, t, mine == adapter, n, real, K, DTYPE, BLOCK_K, EVEN,
                    UPCAST,
                )  # fmt: skip
        for level in range(0, levels):
            mine = tl.load(adapters_TL + t * LEVELS + level, mask=keep, other=0)
            order, number = _distinct(mine)
            for j in range(0, number):
                adapter = tl.sum(tl.where(order == j, mine, 0), axis=0)
                entry, there = entry_of(tables, adapter, place + part, FIELDS)
                own = mine == adapter
                scale = tl.load(scales_TL + t * LEVELS + level, mask=own, other=0.0)
                total, factor, shift = _changed(
                    total, factor, shift, entry, there, inner, scale, t, own, n, real,
                    count, part * S * LEVELS + level, S, LEVELS, MAX_RANK, BLOCK_R,
                )  # fmt: skip
        at = offset + t[None, :] * stride + n[:, None]
        mask = real[:, None] & keep[None, :]
        tl.store(delta + at, total + shift, mask=mask)
        tl.store(factors + at, factor, mask=mask & (applied >= SCALES)[None, :])


def shrink(x: Tensor, effect: InEffect, tables: Tensor, place: int, inner: Tensor) -> None:
    """inner[p, s, l] = the sum of A x over segment s, of place + p, for the rows whose adapter at level l changes that
    place; the other rows, and ranks from the adapter's own on, are not written.

    x: [T, K], float32 or a 16-bit dtype. inner: float32 [parts, S, LEVELS, T, MAX_RANK], S of `split`.
    """
    count, cols = x.shape
    segments, width = split(cols)
    if inner.shape[1:] != (segments, LEVELS, count, MAX_RANK):
        raise ValueError(f"inner must be [parts, {segments}, {LEVELS}, {count}, {MAX_RANK}], not {[*inner.shape]}")
    workers = 4 if count <= _FEW else 2
    launch(
        _shrink, (triton.cdiv(count, _ROWS), workers, len(inner) * segments),
        x, x.stride(0), effect.adapters_TL, effect.applied_T, tables, inner, count, place, cols, width,
        S=segments, WORKERS=workers, BLOCK_R=_ROWS, BLOCK_K=_STEP, EVEN=cols % _STEP == 0, **_options(),
        bytes=x.numel() * x.element_size(),
    )  # fmt: skip


def grow(
    x: Tensor, inner: Tensor, effect: InEffect, tables: Tensor, place: int, delta: Tensor, factors: Tensor,
    rows: Sequence[int], dtype: str,
) -> None:  # fmt: skip
    """The delta of rows with adapters, and the factor of those of which one has the flag SCALES. Where no adapter
    changes the place, these are -0.0 and 1: x + -0.0 is x, to the bit. The rest is not written.

    x, inner: as `shrink` takes and leaves them. rows: N of each part. delta, factors: float32 [T, sum of N], the parts
    beside each other, or [parts, T, N]. dtype: of rows that replace those of the matrices.
    """
    parts, segments, _, count, _ = inner.shape
    if len(rows) != parts or parts > MAX_PARTS:
        raise ValueError(f"{len(rows)} matrices for {parts} parts, of at most {MAX_PARTS}")
    beside, cols = delta.dim() == 2, x.shape[1]
    sizes = [*rows, 0, 0][:MAX_PARTS]
    offsets = (rows[0], sum(rows[:2])) if beside else (count * rows[0], 2 * count * rows[0])
    workers = min(4, count) if count <= _FEW else 1
    launch(
        _grow, (triton.cdiv(max(rows), 64), triton.cdiv(count, _ROWS), parts * workers),
        x, x.stride(0), inner, *effect, tables, delta, factors, count, place, *sizes, delta.stride(-2), *offsets, cols,
        S=segments, DTYPE=DTYPES[dtype], WORKERS=workers, BLOCK_N=64, BLOCK_R=_ROWS, BLOCK_K=_STEP,
        EVEN=cols % _STEP == 0, UPCAST=INTERPRETED, **_options(),
        bytes=4 * count * sum(rows),
    )  # fmt: skip


def _options() -> dict[str, Any]:
    hip = on_hip()
    tile = {"MAX_RANK": MAX_RANK, "BLOCK_T": _ROWS, "num_warps": 2 if hip else 4, "num_stages": 2 if hip else 3}
    return {"LEVELS": LEVELS, "FIELDS": ENTRY_FIELDS, "SCALES": SCALES} | tile | for_large_tiles()
