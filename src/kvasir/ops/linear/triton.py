"""Triton kernels of matrix products with weights on the device.

    product        each segment's sum, [S, T, N]: the consumer joins the segments (ops/kernels.joined)
    whole_product  the segments computed and joined in one program: the same bits, for many rows
    gated_product  act(x gate^T) * (x up^T)

Weights are the first operand of the tensor cores' products and input rows the second, so a tile of 16 rows uses the
same instruction as one of 128. Each segment is one ascending chain over K, in steps of BLOCK_K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
import triton
import triton.language as tl

from kvasir.ops.kernels import activated
from kvasir.ops.launch import INTERPRETED, launch

if TYPE_CHECKING:
    from torch import Tensor

MAX_SEGMENTS = 8
PROGRAMS = 256  # programs that fill a device
SEGMENT = 256  # columns that are worth a program of their own
STEP = 64  # columns per step of the sum over K
_DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, eq=False)
class DeviceMatrix:
    """A weight matrix [rows, cols] on the device. segments: S, of the sum over cols. dtype: of input rows, which
    products round to it.

    format      data                        scales
    F32 ...     its own dtype [N, K]        none
    """

    format: str
    rows: int
    cols: int
    segments: int
    dtype: str
    data: Tensor
    scales: Tensor | None = None
    mins: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols

    @property
    def planes(self) -> list[Tensor]:
        return [plane for plane in (self.data, self.scales, self.mins) if plane is not None]

    @property
    def nbytes(self) -> int:
        return sum(plane.numel() * plane.element_size() for plane in self.planes)


def matrix_from_floats(values: Any, dtype: str, segments: int, put: Callable[[np.ndarray], Any]) -> DeviceMatrix:
    """The matrix of float values [N, K], an array or a tensor in the host's memory, rounded to `dtype`. put: copies an
    array to the device, also one of ml_dtypes.bfloat16."""
    if hasattr(values, "detach"):
        values = _array(values)
    rows, cols = values.shape
    if cols % segments:
        raise ValueError(f"{cols} columns are not {segments} equal segments")
    data = put(np.ascontiguousarray(values.astype(_DTYPES[dtype], copy=False)))
    return DeviceMatrix(_FLOATS[dtype], rows, cols, segments, dtype, data)


def _array(tensor: Tensor) -> np.ndarray:
    """The tensor's memory as an array; numpy itself has no bfloat16."""
    import torch

    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def stacked(matrices: Sequence[DeviceMatrix]) -> DeviceMatrix:
    """The rows of several matrices of one format, number of columns and segments, one after the other."""
    first = matrices[0]
    if len({(m.format, m.cols, m.segments, m.dtype) for m in matrices}) != 1:
        raise ValueError("matrices of several formats or numbers of columns cannot be stacked")
    if len(matrices) == 1:
        return first
    import torch

    def join(planes: list[Any], axis: int) -> Any:
        return None if planes[0] is None else torch.cat(planes, axis)

    return replace(first, rows=sum(m.rows for m in matrices), data=join([m.data for m in matrices], 0))


def choose_segments(rows: int, cols: int, group: int, reduces: bool) -> int:
    """S, the segments of the sum over `cols`: 1, 2, 4 or 8, a function of the shape alone. group: weights that share a
    scale. reduces: whether the matrix's consumer joins segments.

    The least S that fills the device with programs of 64 rows, of whole steps of SEGMENT columns or more. A matrix too
    small for that has segments of at least 32 columns.
    """
    if not reduces:
        return 1
    for least, multiple in ((SEGMENT, lcm(group, STEP)), (32, lcm(group, 32))):
        found = [s for s in (1, 2, 4, MAX_SEGMENTS) if cols % (s * multiple) == 0 and cols // s >= least]
        if enough := [s for s in found if triton.cdiv(rows, 64) * s >= PROGRAMS]:
            return enough[0]
        if found and found[-1] > 1:
            return found[-1]
    return 1


class Tiles(NamedTuple):
    """The shape of a program's tile, and options of the compiler."""

    block_n: int
    block_t: int
    block_k: int
    num_warps: int
    num_stages: int


def tiles(weight: DeviceMatrix, count: int, accumulators: int = 1) -> Tiles:
    """The tiles for `count` input rows. block_k is a function of the matrix alone. accumulators: tiles of sums that a
    program holds at once."""
    block_k = _block_k(weight)
    block_n, num_warps = 64, 4
    block_t = 16 if count <= 16 else 32 if count <= 32 else 64
    size = 4 if weight.dtype == "float32" else 2
    if size == 2 and count >= 128 and triton.cdiv(weight.rows, 128) * triton.cdiv(count, 128) >= PROGRAMS // 2:
        block_n, num_warps = 128, 8
        block_t = 128 if accumulators <= 2 else 64
    stage = ((2 if accumulators == 2 else 1) * block_n + block_t) * block_k * size
    return Tiles(block_n, block_t, block_k, num_warps, max(2, min(6, 96 * 1024 // stage)))


def _block_k(weight: DeviceMatrix) -> int:
    width = weight.cols // weight.segments
    most = STEP if weight.dtype != "float32" else STEP // 2
    for size in (most, 32, 16):
        if width % size == 0:
            return size
    return max(16, min(most, triton.next_power_of_2(width)))


@triton.jit
def rounded(x, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """Float32 values as DTYPE, rounded to nearest even. The interpreter would truncate to bfloat16."""
    if UPCAST and x.dtype == tl.float32 and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        x = tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


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
def _weights(data, offsets, k, last, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    """Columns k to k + BLOCK_K of the weights, [BLOCK_N, BLOCK_K]. offsets: of the rows."""
    columns = k + tl.arange(0, BLOCK_K)
    if EVEN:
        return tl.load(data + offsets[:, None] + columns[None, :])
    return tl.load(data + offsets[:, None] + columns[None, :], mask=(columns < last)[None, :], other=0.0)


@triton.jit
def _chain(
    x, x_offsets, live, data, offsets, first, last, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The sum over columns first to last, float32 [BLOCK_N, BLOCK_T]."""
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for k in tl.range(first, last, BLOCK_K):
        w = _weights(data, offsets, k, last, BLOCK_K, EVEN)
        rows = _inputs(x, x_offsets, live, k, last, w.dtype, BLOCK_K, EVEN, UPCAST)
        acc = _dot(w, rows, acc, UPCAST)
    return acc


@triton.jit
def _rows(x_stride, count, N, K, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr):
    """This program's tile: its outputs n and input rows t, the offsets of both, and which t exist. Outputs beyond the
    last repeat it."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    return n, t, t < count, tl.minimum(n, N - 1).to(tl.int64) * K, t.to(tl.int64) * x_stride


@triton.jit
def _store(acc, bias, out, n, t, live, N, BIAS: tl.constexpr, UPCAST: tl.constexpr):
    """Writes [BLOCK_N, BLOCK_T] as rows of `out`, rounded to its dtype."""
    if BIAS:
        acc = acc + tl.load(bias + n, mask=n < N, other=0.0)[:, None]
    at = out + t.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(at, rounded(acc, out.dtype.element_ty, UPCAST), mask=(n < N)[:, None] & live[None, :])


@triton.jit(do_not_specialize=["count"])
def _product(
    x, x_stride, data, bias, out, count, N, K, S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    n, t, live, offsets, x_offsets = _rows(x_stride, count, N, K, BLOCK_N, BLOCK_T)
    s = tl.program_id(2)
    width = K // S
    acc = _chain(x, x_offsets, live, data, offsets, s * width, (s + 1) * width, BLOCK_N, BLOCK_T, BLOCK_K, EVEN, UPCAST)
    _store(acc, bias, out + s.to(tl.int64) * count * N, n, t, live, N, BIAS, UPCAST)


@triton.jit
def _span(
    x, x_offsets, live, data, offsets, s, width, SPAN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The segments s to s + SPAN, joined by a balanced tree."""
    if SPAN == 1:
        total = _chain(
            x, x_offsets, live, data, offsets, s * width, (s + 1) * width, BLOCK_N, BLOCK_T, BLOCK_K, EVEN, UPCAST
        )
    else:
        total = _span(x, x_offsets, live, data, offsets, s, width, SPAN // 2, BLOCK_N, BLOCK_T, BLOCK_K, EVEN, UPCAST)
        total = total + _span(
            x, x_offsets, live, data, offsets, s + SPAN // 2, width, SPAN // 2,
            BLOCK_N, BLOCK_T, BLOCK_K, EVEN, UPCAST,
        )  # fmt: skip
    return total


@triton.jit(do_not_specialize=["count"])
def _whole(
    x, x_stride, data, bias, out, count, N, K, S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    n, t, live, offsets, x_offsets = _rows(x_stride, count, N, K, BLOCK_N, BLOCK_T)
    acc = _span(x, x_offsets, live, data, offsets, 0, K // S, S, BLOCK_N, BLOCK_T, BLOCK_K, EVEN, UPCAST)
    _store(acc, bias, out, n, t, live, N, BIAS, UPCAST)


@triton.jit(do_not_specialize=["count"])
def _gated(
    x, x_stride, gate, up, out, count, N, K, ACT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    n, t, live, offsets, x_offsets = _rows(x_stride, count, N, K, BLOCK_N, BLOCK_T)
    first = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    second = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        rows = _inputs(x, x_offsets, live, k, K, gate.dtype.element_ty, BLOCK_K, EVEN, UPCAST)
        first = _dot(_weights(gate, offsets, k, K, BLOCK_K, EVEN), rows, first, UPCAST)
        second = _dot(_weights(up, offsets, k, K, BLOCK_K, EVEN), rows, second, UPCAST)
    _store(activated(first, ACT) * second, out, out, n, t, live, N, False, UPCAST)


def product(x: Tensor, weight: DeviceMatrix, out: Tensor, bias: Tensor | None = None) -> None:
    """out[s] = the sum of x W^T over segment s, float32 [S, T, N]. x: [T, K], float32 or the matrix's dtype. bias:
    float32 [N], added if there is one segment; the consumer of several adds it."""
    if bias is not None and weight.segments > 1:
        raise ValueError("a bias is added where the segments are joined")
    _run(_product, x, weight, out, bias, weight.segments, tiles(weight, len(x)))


def whole_product(x: Tensor, weight: DeviceMatrix, out: Tensor, bias: Tensor | None = None) -> None:
    """out = x W^T + bias, [T, N] in float32 or rounded to a 16-bit dtype: the bits of the joined parts of `product`."""
    _run(_whole, x, weight, out, bias, 1, tiles(weight, len(x), _live(weight.segments)))


def _live(segments: int) -> int:
    """Accumulators of a tree over the segments; two for a single one would mean two matrices."""
    return segments.bit_length() if segments > 1 else 1


def _run(
    kernel: Any, x: Tensor, weight: DeviceMatrix, out: Tensor, bias: Tensor | None, parts: int, tile: Tiles
) -> None:
    count, (rows, cols) = len(x), weight.shape
    launch(
        kernel,
        (triton.cdiv(rows, tile.block_n), triton.cdiv(count, tile.block_t), parts),
        *(x, x.stride(0), weight.data, out if bias is None else bias, out, count, rows, cols),
        S=weight.segments,
        **_options(weight, tile),
        BIAS=bias is not None,
        bytes=weight.nbytes + _nbytes(x) + parts * count * rows * out.element_size(),
    )


def gated_product(x: Tensor, gate: DeviceMatrix, up: DeviceMatrix, out: Tensor, act: str) -> None:
    """out = act(x gate^T) * (x up^T), [T, N] in float32 or rounded to a 16-bit dtype. gate, up: of one format and
    shape, of one segment. act: a name that ops/kernels.activated knows."""
    if gate.shape != up.shape or gate.format != up.format or gate.segments > 1 or up.segments > 1:
        raise ValueError("gate and up must be of one shape and format, in one segment")
    count, (rows, cols) = len(x), gate.shape
    tile = tiles(gate, count, 2)
    launch(
        _gated,
        (triton.cdiv(rows, tile.block_n), triton.cdiv(count, tile.block_t)),
        *(x, x.stride(0), gate.data, up.data, out, count, rows, cols),
        ACT=act,
        **_options(gate, tile),
        bytes=gate.nbytes + up.nbytes + _nbytes(x) + count * rows * out.element_size(),
    )


def _options(weight: DeviceMatrix, tile: Tiles) -> dict[str, Any]:
    even = weight.cols // weight.segments % tile.block_k == 0
    return {
        **{"BLOCK_N": tile.block_n, "BLOCK_T": tile.block_t, "BLOCK_K": tile.block_k, "EVEN": even},
        **{"UPCAST": INTERPRETED, "num_warps": tile.num_warps, "num_stages": tile.num_stages},
    }


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
