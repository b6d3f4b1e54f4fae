"""Kernels for a step's bookkeeping on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kvasir.ops.kernels import begin
from kvasir.ops.launch import INTERPRETED, launch

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 128  # tokens of a program
NO_TOKEN = 1 << 30  # the first token of a piece without tokens


@triton.jit
def expand_kernel(
    pieces, ids, rows_T, positions_T, ids_T, num_tokens, row_stride, scratch,
    P: tl.constexpr, WIDTH: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """rows_T, positions_T and ids_T of B tokens."""
    tokens = tl.program_id(0) * B + tl.arange(0, B)
    place = tl.arange(0, P)
    firsts = tl.load(pieces + place * WIDTH + 3)
    before = tl.sum((firsts[None, :] <= tokens[:, None]).to(tl.int32), axis=1)
    piece = tl.maximum(before, 1) - 1
    at = pieces + piece * WIDTH
    row, start, count, first = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    offset = tokens - first
    real = (offset >= 0) & (offset < count)
    row = tl.where(real, row, scratch)
    position = tl.where(real, start + offset, 0)
    inside = tokens < num_tokens
    found = tl.load(ids + row.to(tl.int64) * row_stride + position, mask=inside, other=0)
    tl.store(rows_T + tokens, row, mask=inside)
    tl.store(positions_T + tokens, position, mask=inside)
    tl.store(ids_T + tokens, found, mask=inside)


def expand(pieces: Tensor, ids: Tensor, rows_T: Tensor, positions_T: Tensor, ids_T: Tensor) -> None:
    """The row, position and id of each token of a step; the last row and position 0 for tokens of no piece.

    pieces: int32 [P, 5], P a power of two: row, start, count, first token, flags, in ascending order of the first
    token; unused ones have a count of 0 and NO_TOKEN. ids: int32 [rows + 1, max ids].
    Results: int32 [T].
    """
    count = len(rows_T)
    launch(
        expand_kernel, (-(-count // _BLOCK),),
        pieces, ids, rows_T, positions_T, ids_T, count, ids.stride(0), len(ids) - 1,
        P=len(pieces), WIDTH=pieces.shape[1], B=_BLOCK, num_warps=4, bytes=4 * (pieces.numel() + 4 * count),
    )  # fmt: skip


@triton.jit
def take_rows_kernel(x, chosen, out, width, UPCAST: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr):
    """Copies B columns of a row."""
    begin(PDL)
    row, columns = tl.program_id(0), tl.program_id(1) * B + tl.arange(0, B)
    source = tl.load(chosen + row).to(tl.int64)
    value = tl.load(x + source * width + columns, mask=columns < width, other=0.0)
    if UPCAST:
        value = value.to(tl.float32)
    tl.store(out + row.to(tl.int64) * width + columns, value.to(out.dtype.element_ty), mask=columns < width)


def take_rows(x: Tensor, chosen: Tensor, out: Tensor) -> None:
    """out[s] = x[chosen[s]], rounded to out's dtype. x: [T, D]. chosen: int32 [S]."""
    count, width = out.shape
    launch(
        take_rows_kernel, (count, -(-width // 1024)), x, chosen, out, width,
        UPCAST=INTERPRETED, B=1024, num_warps=4, bytes=count * width * (x.element_size() + out.element_size()),
    )  # fmt: skip
