"""Triton kernels of matrix products with weights on the device.

    product        the sums of parts of the segments, [P, T, N]: the consumer joins them (ops/kernels.joined)
    whole_product  the segments computed and joined in one program: the same bits, for many rows
    gated_product  act(x gate^T) * (x up^T)

Weights are the first operand of the tensor cores' products and input rows the second, so a tile of 16 rows uses the
same instruction as one of 128. Each segment is one ascending chain over K:

    F32, F16, BF16      one accumulator through all steps of BLOCK_K columns
    groups of columns   per group a product of exact levels, accumulated from zero in float32; sum = fma(it, scale, sum)
                        in ascending order, and for Q4_K then fma(sum of the group's inputs, -min, sum)
    *_ROW               one accumulator of exact levels, multiplied by the row's scale at the segment's end
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from kvasir.ops.kernels import activated, begin, rounded
from kvasir.ops.launch import INTERPRETED, for_large_tiles, launch, on_hip
from kvasir.ops.linear.triton_decode import levels, min_of, scale_of
from kvasir.ops.linear.triton_in_effect import SCALES
from kvasir.ops.linear.triton_matrix import (
    CHUNK,
    FORMATS,
    GGUF,
    LAYOUTS,
    PROGRAMS,
    STEP,
    DeviceMatrix,
    can_read,
    choose_segments,
    matrix_from_codes,
    matrix_from_floats,
    matrix_from_gguf,
    stacked,
    unit,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "FORMATS",
    "GGUF",
    "Delta",
    "DeviceMatrix",
    "Tiles",
    "can_read",
    "choose_segments",
    "gated_product",
    "matrix_from_codes",
    "matrix_from_floats",
    "matrix_from_gguf",
    "product",
    "stacked",
    "tiles",
    "unit",
    "whole_product",
]


class Delta(NamedTuple):
    """How adapters change a product (ops/linear/triton_low_rank): factors * product + values. Both are float32 [T, N],
    or [2, T, N] of gate and up. applied_T: as of `InEffect`: values are read for rows with an adapter, factors for rows
    with the flag SCALES; where a factor is 0, the result is the value alone."""

    values: Tensor
    factors: Tensor
    applied_T: Tensor


_SCALES = tl.constexpr(SCALES)
DTYPES = {"float32": tl.float32, "float16": tl.float16, "bfloat16": tl.bfloat16}


class Tiles(NamedTuple):
    """The shape of a program's tile, and options of the compiler."""

    block_n: int
    block_t: int
    block_k: int
    num_warps: int
    num_stages: int


def tiles(weight: DeviceMatrix, count: int, accumulators: int = 1, hip: bool = False) -> Tiles:
    """The tiles for `count` input rows. block_k is a function of the matrix alone. accumulators: tiles of sums that a
    program holds at once."""
    block_k = _block_k(weight)
    block_n, num_warps = 64, 4
    block_t = 16 if count <= 16 else 32 if count <= 32 else 64
    size = 4 if weight.dtype == "float32" else 2
    if size == 2 and count >= 128 and triton.cdiv(weight.rows, 128) * triton.cdiv(count, 128) >= PROGRAMS // 2:
        block_n, num_warps = 128, 8
        block_t = 128 if accumulators <= 2 and weight.format not in LAYOUTS else 64
    layout = LAYOUTS.get(weight.format)
    if layout and layout.group == 32:
        # A group's sum and a tree over segments take more registers. Q4_K's second product per group would not leave
        # room in the 512 columns of sm_100's tensor memory, and Triton then compiles a kernel that only traps.
        if accumulators > 2 or weight.format == "Q4_K":
            block_n, block_t, num_warps = 64, min(block_t, 32), 4
        if weight.format == "MXFP4" and accumulators == 2 and block_n == 64:
            block_t = min(block_t, 32)
    if accumulators > 4 or (size == 4 and layout):
        block_t = min(block_t, 16 if accumulators > 5 and layout else 32)
    if layout and layout.bits == 8 and accumulators == 2 and block_n == 64:
        block_t = min(block_t, 32)
    weights = layout.bits // 4 if layout else 2 * size  # half bytes
    matrices = 2 if accumulators == 2 and not layout else 1  # in one loop
    stage = (matrices * block_n * weights // 2 + block_t * size) * block_k
    if hip:
        return Tiles(block_n, block_t, block_k, num_warps // 2, 2)
    return Tiles(block_n, block_t, block_k, num_warps, max(2, min(6, 96 * 1024 // stage)))


def _block_k(weight: DeviceMatrix) -> int:
    if weight.format in LAYOUTS:
        return CHUNK
    width = weight.cols // weight.segments
    most = STEP if weight.dtype != "float32" else STEP // 2
    for size in (most, 32, 16):
        if width % size == 0:
            return size
    return max(16, min(most, triton.next_power_of_2(width)))


@triton.jit
def _dot(w, x, acc, UPCAST: tl.constexpr):
    if UPCAST:
        w = w.to(tl.float32)
        x = x.to(tl.float32)
    return tl.dot(w, x, acc, input_precision="ieee")


@triton.jit
def _inputs(
    x, offsets, live, k, last, DTYPE: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr
):
    """Columns k to k + BLOCK_K of the input rows, [BLOCK_K, BLOCK_T] as DTYPE. offsets: of the rows."""
    columns = k + tl.arange(0, BLOCK_K)
    mask = live[None, :]
    if not EVEN:
        mask = mask & (columns < last)[:, None]
    return rounded(tl.load(x + offsets[None, :] + columns[:, None], mask=mask, other=0.0), DTYPE, UPCAST)


@triton.jit
def _weights(data, n, K, k, last, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    """Columns k to k + BLOCK_K of the rows n of a float matrix, [BLOCK_N, BLOCK_K]."""
    columns = k + tl.arange(0, BLOCK_K)
    at = data + (n.to(tl.int64) * K)[:, None] + columns[None, :]
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=(columns < last)[None, :], other=0.0)


@triton.jit
def _words(data, n, chunks, k, part, BITS: tl.constexpr, WORDS: tl.constexpr):
    """Words of the chunk that starts at column k, [BLOCK_N, WORDS]: all of them, or `part` of two."""
    PER_CHUNK: tl.constexpr = 4 * BITS
    at = k // 128 * PER_CHUNK + part * WORDS + tl.arange(0, WORDS)
    return tl.load(data + (n.to(tl.int64) * (chunks * PER_CHUNK))[:, None] + at[None, :])


@triton.jit
def _group_scales(scales, mins, n, K, chunks, k, FORMAT: tl.constexpr):
    """What the four groups of the chunk at column k need, [BLOCK_N] each, not yet decoded."""
    at = scales + n.to(tl.int64) * (chunks * 4) + k // 32
    block = n
    if FORMAT == "Q4_K":
        block = tl.load(mins + n.to(tl.int64) * (K // 256) + k // 256)
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), block


@triton.jit
def _group(
    acc, x, x_offsets, live, words, raw, block, k, last, SHIFT: tl.constexpr, FORMAT: tl.constexpr,
    DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Adds one group of 32 columns from k on."""
    rows = _inputs(x, x_offsets, live, k, last, DTYPE, 32, EVEN, UPCAST)
    zero = tl.zeros_like(acc)
    part = _dot(levels(words, SHIFT, FORMAT, DTYPE, BLOCK_N, 16, UPCAST).to(DTYPE), rows, zero, UPCAST)
    acc = tl.fma(part, tl.broadcast_to(scale_of(raw, block, FORMAT)[:, None], acc.shape), acc)
    if FORMAT == "Q4_K":
        part = _dot(tl.full((BLOCK_N, 32), 1.0, DTYPE), rows, zero, UPCAST)
        acc = tl.fma(part, tl.broadcast_to(-min_of(raw, block)[:, None], acc.shape), acc)
    return acc


@triton.jit
def _groups(
    acc, x, x_offsets, live, data, n, chunks, s0, s1, s2, s3, block, k, last, FORMAT: tl.constexpr,
    DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Adds the four groups of the chunk at column k."""
    if FORMAT == "Q8_0":
        a = _words(data, n, chunks, k, 0, 8, 16)
        b = _words(data, n, chunks, k, 1, 8, 16)
        acc = _group(acc, x, x_offsets, live, a, s0, block, k, last, 0, FORMAT, DTYPE, BLOCK_N, EVEN, UPCAST)
        acc = _group(acc, x, x_offsets, live, a, s1, block, k + 32, last, 8, FORMAT, DTYPE, BLOCK_N, EVEN, UPCAST)
        acc = _group(acc, x, x_offsets, live, b, s2, block, k + 64, last, 0, FORMAT, DTYPE, BLOCK_N, EVEN, UPCAST)
        acc = _group(acc, x, x_offsets, live, b, s3, block, k + 96, last, 8, FORMAT, DTYPE, BLOCK_N, EVEN, UPCAST)
    else:
        a = _words(data, n, chunks, k, 0, 4, 16)
        acc = _group(acc, x, x_offsets, live, a, s0, block, k, last, 0, FORMAT, DTYPE, BLOCK_N, EVEN, UPCAST)
        acc = _group(acc, x, x_offsets, live, a, s1, block, k + 32, last, 4, FORMAT, DTYPE, BLOCK_N, EVEN, UPCAST)
        acc = _group(acc, x, x_offsets, live, a, s2, block, k + 64, last, 8, FORMAT, DTYPE, BLOCK_N, EVEN, UPCAST)
        acc = _group(acc, x, x_offsets, live, a, s3, block, k + 96, last, 12, FORMAT, DTYPE, BLOCK_N, EVEN, UPCAST)
    return acc


@triton.jit
def _bytes(
    acc, x, x_offsets, live, data, n, chunks, k, last, FORMAT: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Adds the products of the levels of the chunk at column k, of a format of 8 bits without groups of 32."""
    words = _words(data, n, chunks, k, 0, 8, 32)
    rows = _inputs(x, x_offsets, live, k, last, DTYPE, 64, EVEN, UPCAST)
    acc = _dot(levels(words, 0, FORMAT, DTYPE, BLOCK_N, 32, UPCAST).to(DTYPE), rows, acc, UPCAST)
    rows = _inputs(x, x_offsets, live, k + 64, last, DTYPE, 64, EVEN, UPCAST)
    return _dot(levels(words, 8, FORMAT, DTYPE, BLOCK_N, 32, UPCAST).to(DTYPE), rows, acc, UPCAST)


@triton.jit
def _chain(
    x, x_offsets, live, data, scales, mins, n, K, first, last, FORMAT: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The sum over columns first to last, float32 [BLOCK_N, BLOCK_T]."""
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    chunks = tl.cdiv(K, 128)
    final = first + (last - first - 1) // BLOCK_K * BLOCK_K  # where the last step starts
    if FORMAT == "F32" or FORMAT == "F16" or FORMAT == "BF16":
        for k in tl.range(first, last, BLOCK_K):
            w = _weights(data, n, K, k, last, BLOCK_K, EVEN)
            acc = _dot(w, _inputs(x, x_offsets, live, k, last, DTYPE, BLOCK_K, EVEN, UPCAST), acc, UPCAST)
    elif FORMAT == "F8_ROW" or FORMAT == "I8_ROW":
        for k in tl.range(first, last, BLOCK_K):
            acc = _bytes(acc, x, x_offsets, live, data, n, chunks, k, last, FORMAT, DTYPE, BLOCK_N, EVEN, UPCAST)
        acc = acc * tl.load(scales + n)[:, None]
    elif FORMAT == "F8_BLOCK":
        at = scales + n.to(tl.int64) * chunks
        scale = tl.load(at + first // 128)  # scales are loaded a step ahead: they bypass the pipeline of the words
        for k in tl.range(first, last, BLOCK_K):
            ahead = tl.load(at + tl.minimum(k + BLOCK_K, final) // 128)
            part = tl.zeros_like(acc)
            part = _bytes(part, x, x_offsets, live, data, n, chunks, k, last, FORMAT, DTYPE, BLOCK_N, EVEN, UPCAST)
            acc = tl.fma(part, tl.broadcast_to(scale[:, None], acc.shape), acc)
            scale = ahead
    else:
        s0, s1, s2, s3, block = _group_scales(scales, mins, n, K, chunks, first, FORMAT)
        for k in tl.range(first, last, BLOCK_K):
            ahead = tl.minimum(k + BLOCK_K, final)
            a0, a1, a2, a3, a_block = _group_scales(scales, mins, n, K, chunks, ahead, FORMAT)
            acc = _groups(
                acc, x, x_offsets, live, data, n, chunks, s0, s1, s2, s3, block, k, last,
                FORMAT, DTYPE, BLOCK_N, EVEN, UPCAST,
            )  # fmt: skip
            s0, s1, s2, s3, block = a0, a1, a2, a3, a_block
    return acc


@triton.jit
def _rows(x_stride, count, N, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr):
    """This program's tile: its outputs n, the rows of weights for them (beyond the last, it repeats), its input rows t,
    which of those exist, and their offsets."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    return n, tl.minimum(n, N - 1), t, t < count, t.to(tl.int64) * x_stride


@triton.jit
def _adapted(acc, delta, factors, applied_T, n, t, live, N, first):
    """acc as the adapters of the rows change it; rows without one keep their bits. first: whether it is the segment
    that gets the delta."""
    applied = tl.load(applied_T + t, mask=live, other=0)
    scaled, has = (applied >= _SCALES)[None, :], (applied != 0)[None, :]
    at, real = t.to(tl.int64)[None, :] * N + n[:, None], (n < N)[:, None]
    factor = tl.load(factors + at, mask=real & scaled, other=1.0)
    acc = tl.where(factor == 0.0, 0.0, acc * factor)  # also where the product is not finite
    if first:
        acc = tl.where(has, acc + tl.load(delta + at, mask=real & has, other=0.0), acc)
    return acc


@triton.jit
def _store(acc, bias, out, n, t, live, N, UPCAST: tl.constexpr):
    """Writes [BLOCK_N, BLOCK_T] as rows of `out`, rounded to its dtype."""
    if bias is not None:
        acc = acc + tl.load(bias + n, mask=n < N, other=0.0)[:, None]
    at = out + t.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(at, rounded(acc, out.dtype.element_ty, UPCAST), mask=(n < N)[:, None] & live[None, :])


@triton.jit(do_not_specialize=["count"])
def _product(
    x, x_stride, data, scales, mins, bias, out, delta, factors, applied_T, count, N, K, width, FORMAT: tl.constexpr,
    DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    n, rows, t, live, x_offsets = _rows(x_stride, count, N, BLOCK_N, BLOCK_T)
    s = tl.program_id(2)
    first = s * width
    acc = _chain(
        x, x_offsets, live, data, scales, mins, rows, K, first, first + width,
        FORMAT, DTYPE, BLOCK_N, BLOCK_T, BLOCK_K, EVEN, UPCAST,
    )  # fmt: skip
    if delta is not None:
        acc = _adapted(acc, delta, factors, applied_T, n, t, live, N, s == 0)
    _store(acc, bias, out + s.to(tl.int64) * count * N, n, t, live, N, UPCAST)


@triton.jit(do_not_specialize=["count"])
def _whole(
    x, x_stride, data, scales, mins, bias, out, delta, factors, applied_T, count, N, K, width, S: tl.constexpr,
    FORMAT: tl.constexpr, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    n, rows, t, live, x_offsets = _rows(x_stride, count, N, BLOCK_N, BLOCK_T)
    part = tl.program_id(2)
    # A balanced tree: sums of 1, 2 and 4 segments wait for their neighbours.
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    one, two, four = acc, acc, acc
    for s in tl.range(0, S, num_stages=1):
        first = (part * S + s) * width
        acc = _chain(
            x, x_offsets, live, data, scales, mins, rows, K, first, first + width,
            FORMAT, DTYPE, BLOCK_N, BLOCK_T, BLOCK_K, EVEN, UPCAST,
        )  # fmt: skip
        if delta is not None:
            acc = _adapted(acc, delta, factors, applied_T, n, t, live, N, first == 0)
        if S >= 2:
            if s % 2 == 0:
                one = acc
            else:
                acc = one + acc
        if S >= 4:
            if s % 4 == 1:
                two = acc
            if s % 4 == 3:
                acc = two + acc
        if S == 8:
            if s == 3:
                four = acc
            if s == 7:
                acc = four + acc
    _store(acc, bias, out + part.to(tl.int64) * count * N, n, t, live, N, UPCAST)


@triton.jit(do_not_specialize=["count"])
def _gated(
    x, x_stride, gate, gate_scales, gate_mins, up, up_scales, up_mins, out, delta, factors, applied_T, count, N, K,
    ACT: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    n, rows, t, live, x_offsets = _rows(x_stride, count, N, BLOCK_N, BLOCK_T)
    if FORMAT == "F32" or FORMAT == "F16" or FORMAT == "BF16":
        first = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        second = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            inputs = _inputs(x, x_offsets, live, k, K, DTYPE, BLOCK_K, EVEN, UPCAST)
            first = _dot(_weights(gate, rows, K, k, K, BLOCK_K, EVEN), inputs, first, UPCAST)
            second = _dot(_weights(up, rows, K, k, K, BLOCK_K, EVEN), inputs, second, UPCAST)
    else:
        first = _chain(
            x, x_offsets, live, gate, gate_scales, gate_mins, rows, K, 0, K,
            FORMAT, DTYPE, BLOCK_N, BLOCK_T, BLOCK_K, EVEN, UPCAST,
        )  # fmt: skip
        second = _chain(
            x, x_offsets, live, up, up_scales, up_mins, rows, K, 0, K,
            FORMAT, DTYPE, BLOCK_N, BLOCK_T, BLOCK_K, EVEN, UPCAST,
        )  # fmt: skip
    if delta is not None:
        behind = count.to(tl.int64) * N
        first = _adapted(first, delta, factors, applied_T, n, t, live, N, True)
        second = _adapted(second, delta + behind, factors + behind, applied_T, n, t, live, N, True)
    _store(activated(first, ACT) * second, None, out, n, t, live, N, UPCAST)


def product(
    x: Tensor, weight: DeviceMatrix, out: Tensor, bias: Tensor | None = None, delta: Delta | None = None
) -> None:
    """out[p] = the sum of x W^T over part p of the segments, float32 [P, T, N], where P divides S. x: [T, K], float32
    or the matrix's dtype. bias: float32 [N], added if there is one part; the consumer of several adds it. delta:
    changes the sum, and is added to the first segment."""
    parts = len(out)
    if weight.segments % parts or (bias is not None and parts > 1):
        raise ValueError(f"{weight.segments} segments in {parts} parts; a bias is added where parts are joined")
    if parts < weight.segments:
        _joining(x, weight, out, bias, delta, parts)
        return
    tile = tiles(weight, len(x), hip=on_hip())
    _run(_product, x, weight, out, bias, delta, parts, tile, _options(weight, tile))


def whole_product(
    x: Tensor, weight: DeviceMatrix, out: Tensor, bias: Tensor | None = None, delta: Delta | None = None
) -> None:
    """out = x W^T + bias, [T, N] in float32 or rounded to a 16-bit dtype: the bits of the joined parts of `product`."""
    _joining(x, weight, out, bias, delta, 1)


def _joining(
    x: Tensor, weight: DeviceMatrix, out: Tensor, bias: Tensor | None, delta: Delta | None, parts: int
) -> None:
    """The segments of each part computed and joined in one program."""
    segments = weight.segments // parts
    tile = tiles(weight, len(x), _accumulators(segments, delta is not None), on_hip())
    _run(_whole, x, weight, out, bias, delta, parts, tile, {"S": segments} | _options(weight, tile))


def _accumulators(segments: int, adapted: bool) -> int:
    """Of a tree over the segments, and what adapters change; two would mean two matrices."""
    return 1 if segments == 1 else max(3, segments.bit_length()) + 2 * adapted


def _run(
    kernel: Any,
    x: Tensor,
    weight: DeviceMatrix,
    out: Tensor,
    bias: Tensor | None,
    delta: Delta | None,
    parts: int,
    tile: Tiles,
    options: dict[str, Any],
) -> None:
    count, (rows, cols) = len(x), weight.shape
    launch(
        kernel,
        (triton.cdiv(rows, tile.block_n), triton.cdiv(count, tile.block_t), parts),
        *(x, x.stride(0), weight.data, weight.scales, weight.mins, bias, out, *(delta or _NO_DELTA)),
        *(count, rows, cols, cols // weight.segments),
        **options,
        bytes=weight.nbytes + _nbytes(x) + parts * count * rows * out.element_size(),
    )


def gated_product(
    x: Tensor, gate: DeviceMatrix, up: DeviceMatrix, out: Tensor, act: str, delta: Delta | None = None
) -> None:
    """out = act(x gate^T) * (x up^T), [T, N] in float32 or rounded to a 16-bit dtype. gate, up: of one format and
    shape, of one segment. act: a name that ops/kernels.activated knows. delta: changes both before `act`."""
    if gate.shape != up.shape or gate.format != up.format or gate.segments > 1 or up.segments > 1:
        raise ValueError("gate and up must be of one shape and format, in one segment")
    count, (rows, cols) = len(x), gate.shape
    hip = on_hip()
    tile = tiles(gate, count, 2, hip)
    launch(
        _gated,
        (triton.cdiv(rows, tile.block_n), triton.cdiv(count, tile.block_t)),
        *(x, x.stride(0), gate.data, gate.scales, gate.mins, up.data, up.scales, up.mins, out),
        *(*(delta or _NO_DELTA), count, rows, cols),
        ACT=act,
        **_options(gate, tile),
        bytes=gate.nbytes + up.nbytes + _nbytes(x) + count * rows * out.element_size(),
    )


_NO_DELTA = (None, None, None)


def _options(weight: DeviceMatrix, tile: Tiles) -> dict[str, Any]:
    even = weight.cols // weight.segments % tile.block_k == 0
    return {
        **{"FORMAT": weight.format, "DTYPE": DTYPES[weight.dtype], "EVEN": even, "UPCAST": INTERPRETED},
        **{"BLOCK_N": tile.block_n, "BLOCK_T": tile.block_t, "BLOCK_K": tile.block_k},
        **{"num_warps": tile.num_warps, "num_stages": tile.num_stages},
        **for_large_tiles(),
    }


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
