"""Triton kernels of low-rank adapters: what each row's adapter adds to the product of a matrix (see `low_rank`).

    shrink   inner = A x, [S, T, rank], by segments of x's columns
    grow     delta = B (the sum of the segments), which the products of ops/linear/triton add to their first segment

Rows of one step may have different adapters, of different ranks. A program computes with 16 rows: for each adapter
among them a tile of its own, whose result it keeps for the rows of that adapter. All sums are float32, in an order that
depends on nothing but the matrices' shapes: ascending over the columns of a segment, over segments, and over ranks.

Kernels find matrices through tables in device memory, so setting or removing an adapter changes no launch:

    tables   int64, by adapter id: the address of the adapter's entries, 0 for none
    entries  int64 [slots, ENTRY_FIELDS]: addresses of A [rank, K] and B [N, rank], both float32, and the rank; zeros
             for a matrix that the adapter leaves alone
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from kvasir.ops.kernels import begin
from kvasir.ops.launch import for_large_tiles, launch, on_hip

if TYPE_CHECKING:
    from torch import Tensor

ENTRY_FIELDS = 3
MAX_PARTS = 3  # matrices of one launch
MAX_RANK = 256
_ROWS = 16  # token rows of a program, and ranks of a tile
_STEP = 64  # columns per step of a sum
_SEGMENT, _MAX_SEGMENTS = 512, 16  # columns that are worth a program of their own; most segments
_FEW = 64  # rows up to which several programs share the work of a tile, to fill more of the device


def split(cols: int) -> tuple[int, int]:
    """The number of segments of a sum over `cols` columns, and the columns of each but the last."""
    segments = min(_MAX_SEGMENTS, max(1, cols // _SEGMENT))
    width = triton.cdiv(triton.cdiv(cols, segments), _STEP) * _STEP
    return triton.cdiv(cols, width), width


@triton.jit
def _distinct(adapters_T, first, count, BLOCK_T: tl.constexpr):
    """The adapters of rows from `first` on, [BLOCK_T]; for the first row of each adapter its number in order of
    appearance, -1 for the other rows; how many adapters there are."""
    i = tl.arange(0, BLOCK_T)
    mine = tl.load(adapters_T + first + i, mask=first + i < count, other=0)
    before = i[None, :] < i[:, None]
    again = tl.sum((before & (mine[None, :] == mine[:, None])).to(tl.int32), axis=1)
    opens = (mine != 0) & (again == 0)
    number = tl.sum((before & opens[None, :]).to(tl.int32), axis=1)
    return mine, tl.where(opens, number, -1), tl.sum(opens.to(tl.int32), axis=0)


@triton.jit
def _entry(tables, adapter, slot, FIELD: tl.constexpr):
    """The address of A (FIELD 0) or B (FIELD 1) of a slot, and the rank; zeros if the adapter leaves the slot alone."""
    entries = tl.load(tables + adapter)
    at = entries.to(tl.pointer_type(tl.int64)) + slot * 3
    address = tl.load(at + FIELD, mask=entries != 0, other=0)
    rank = tl.load(at + 2, mask=entries != 0, other=0)
    return tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16), rank.to(tl.int32)


@triton.jit(do_not_specialize=["count", "slot"])
def _shrink(
    x, x_stride, adapters_T, tables, inner, count, slot, K, width, S: tl.constexpr, MAX_RANK: tl.constexpr,
    WORKERS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    tile, worker, place = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    part, s = place // S, place % S
    mine, order, number = _distinct(adapters_T, tile * BLOCK_T, count, BLOCK_T)
    t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    first = s * width
    last = tl.minimum(first + width, K)
    done = 0  # tiles of ranks of the adapters so far; every WORKERS-th is this program's
    for j in range(0, number):
        adapter = tl.sum(tl.where(order == j, mine, 0), axis=0)
        a, rank = _entry(tables, adapter, slot + part, 0)
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
            out = inner + (place.to(tl.int64) * count + t)[None, :] * MAX_RANK + r[:, None]
            tl.store(out, acc, mask=real[:, None] & own[None, :])
        done += blocks


@triton.jit(do_not_specialize=["count", "slot"])
def _grow(
    inner, adapters_T, tables, delta, count, slot, n0, n1, n2, stride, offset1, offset2, S: tl.constexpr,
    MAX_RANK: tl.constexpr, WORKERS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    tile, part, worker = tl.program_id(1), tl.program_id(2) // WORKERS, tl.program_id(2) % WORKERS
    N = tl.where(part == 0, n0, tl.where(part == 1, n1, n2))
    offset = tl.where(part == 0, 0, tl.where(part == 1, offset1, offset2))
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = (tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    there = n < N
    # The number that changes no other one by its addition; a literal would become a positive zero.
    nothing = tl.full((BLOCK_N, BLOCK_T), -(2**31), tl.int32).to(tl.float32, bitcast=True)
    if tl.program_id(0) * BLOCK_N < N:
        mine, order, number = _distinct(adapters_T, tile * BLOCK_T, count, BLOCK_T)
        for j in range(worker, number, WORKERS):
            adapter = tl.sum(tl.where(order == j, mine, 0), axis=0)
            b, rank = _entry(tables, adapter, slot + part, 1)
            own = mine == adapter
            acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
            for first in tl.range(0, rank, BLOCK_R, num_stages=1):
                r = first + tl.arange(0, BLOCK_R)
                w = tl.load(b + (n * rank)[:, None] + r[None, :], mask=there[:, None] & (r < rank)[None, :], other=0.0)
                total = tl.zeros((BLOCK_R, BLOCK_T), tl.float32)
                for s in range(0, S):
                    at = inner + ((part * S + s).to(tl.int64) * count + t)[None, :] * MAX_RANK + r[:, None]
                    total = total + tl.load(at, mask=(r < rank)[:, None] & own[None, :], other=0.0)
                acc = tl.dot(w, total, acc, input_precision="ieee")
            out = delta + offset + t[None, :] * stride + n[:, None]
            tl.store(out, tl.where(rank > 0, acc, nothing), mask=there[:, None] & own[None, :])


def shrink(x: Tensor, adapters_T: Tensor, tables: Tensor, slot: int, inner: Tensor) -> None:
    """inner[p, s] = the sum of A x over segment s, of slot + p, for the rows whose adapter changes that slot; the other
    rows, and ranks from the adapter's own on, are not written.

    x: [T, K], float32 or a 16-bit dtype. adapters_T: int32 [T], 0 for none. inner: float32 [parts, S, T, MAX_RANK], S
    of `split`.
    """
    count, cols = x.shape
    segments, width = split(cols)
    if inner.shape[1:] != (segments, count, MAX_RANK):
        raise ValueError(f"inner must be [parts, {segments}, {count}, {MAX_RANK}], not {[*inner.shape]}")
    workers = 4 if count <= _FEW else 2
    launch(
        _shrink, (triton.cdiv(count, _ROWS), workers, len(inner) * segments),
        x, x.stride(0), adapters_T, tables, inner, count, slot, cols, width,
        S=segments, WORKERS=workers, BLOCK_R=_ROWS, BLOCK_K=_STEP, EVEN=cols % _STEP == 0, **_options(),
        bytes=x.numel() * x.element_size(),
    )  # fmt: skip


def grow(inner: Tensor, adapters_T: Tensor, tables: Tensor, slot: int, delta: Tensor, rows: Sequence[int]) -> None:
    """delta = B inner for rows with an adapter, with -0.0 where it leaves the slot alone: x + -0.0 is x, to the bit.
    The other rows are not written.

    rows: N of each part. delta: float32 [T, sum of N], the parts beside each other, or [parts, T, N].
    """
    parts, segments, count, _ = inner.shape
    if len(rows) != parts or parts > MAX_PARTS:
        raise ValueError(f"{len(rows)} matrices for {parts} parts, of at most {MAX_PARTS}")
    beside = delta.dim() == 2
    sizes = [*rows, 0, 0][:MAX_PARTS]
    offsets = (rows[0], sum(rows[:2])) if beside else (count * rows[0], 2 * count * rows[0])
    workers = min(4, count) if count <= _FEW else 1
    launch(
        _grow, (triton.cdiv(max(rows), 64), triton.cdiv(count, _ROWS), parts * workers),
        inner, adapters_T, tables, delta, count, slot, *sizes, delta.stride(-2), *offsets,
        S=segments, WORKERS=workers, BLOCK_N=64, BLOCK_R=_ROWS, **_options(),
        bytes=4 * count * sum(rows),
    )  # fmt: skip


def _options() -> dict[str, Any]:
    hip = on_hip()
    tile = {"MAX_RANK": MAX_RANK, "BLOCK_T": _ROWS, "num_warps": 2 if hip else 4, "num_stages": 2 if hip else 3}
    return tile | for_large_tiles()
