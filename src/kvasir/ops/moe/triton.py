"""Triton kernels of mixtures of experts, all counts on the device.

    route             the experts of each row, in ascending id
    sort_by_expert    rows of one expert side by side, in tiles
    expert_gated      act(x gate^T) * (x up^T) of each row and chosen expert
    expert_down       their products with the experts' third matrices
    combine           each row's weighted sum, in ascending expert id

A row's products are those of ops/linear/triton.py: the same device functions and tiles, so a row's bits depend neither
on the other rows nor on where an expert's rows lie. Pair t * k + j is row t with its j-th expert.
Letters: T token rows, E experts, k chosen experts of a row, D model width, I an expert's inner width, S segments of the
sums over I.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from kvasir.ops.kernels import activated, begin, joined, part_of, rounded
from kvasir.ops.launch import launch, on_hip
from kvasir.ops.linear.triton import _chain, _dot, _inputs, _options, _weights, tiles

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.ops.linear.triton import DeviceMatrix, Tiles

TILE_FIELDS = 3
MOST_EXPERTS = 1024
_BLOCK = 32  # pairs looked at together


@triton.jit
def _route(
    logits, scales, ids, weights, stride,
    E: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr, NORMALISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + e, mask=e < E, other=float("-inf"))
    order = tl.where(x == x, x, float("-inf"))  # NaN: still k experts that exist, with weights of NaN
    free = e < E
    for _ in range(TOP):
        best = tl.max(tl.where(free, order, float("-inf")), 0)
        free = free & (e != tl.min(tl.where(free & (order == best), e, BLOCK), 0))
    chosen = (e < E) & (free == 0)
    best = tl.max(order, 0)
    p = tl.where(e < E, tl.exp(x - tl.where(best == float("-inf"), 0.0, best)), 0.0)
    total = tl.sum(tl.where(chosen, p, 0.0) if NORMALISE else p, 0)
    place = row * TOP + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(ids + place, e, mask=chosen)
    weight = p / total
    if scales is not None:
        weight = weight * tl.load(scales + e, mask=e < E, other=0.0)
    tl.store(weights + place, weight, mask=chosen)


@triton.jit(do_not_specialize=["pairs"])
def _sort(
    ids, order, found, num_tiles, pairs, first_id,
    E: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_T: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program per expert: its pairs in ascending order, and its tiles."""
    begin(PDL)
    own = tl.program_id(0)
    experts, lanes = tl.arange(0, EXPERTS), tl.arange(0, BLOCK)
    counts = tl.zeros([EXPERTS], tl.int32)
    for base in range(0, pairs, BLOCK):
        id = tl.load(ids + base + lanes, mask=base + lanes < pairs, other=-1) - first_id
        counts += tl.sum(((id[None, :] == experts[:, None]) & (experts < E)[:, None]).to(tl.int32), 1)
    tiles = (counts + BLOCK_T - 1) // BLOCK_T
    first = tl.sum(tl.where(experts < own, counts, 0), 0)
    first_tile = tl.sum(tl.where(experts < own, tiles, 0), 0)
    count = tl.sum(tl.where(experts == own, counts, 0), 0)
    if own == 0:
        tl.store(num_tiles, tl.sum(tiles, 0))
    for base in range(0, (count + BLOCK_T - 1) // BLOCK_T, BLOCK):
        tile = base + lanes
        mask = tile * BLOCK_T < count
        at = found + (first_tile + tile) * FIELDS
        tl.store(at, own, mask=mask)
        tl.store(at + 1, first + tile * BLOCK_T, mask=mask)
        tl.store(at + 2, tl.minimum(BLOCK_T, count - tile * BLOCK_T), mask=mask)
    if count > 0:
        seen = first
        for base in range(0, pairs, BLOCK):
            mine = tl.load(ids + base + lanes, mask=base + lanes < pairs, other=-1) - first_id == own
            rank = tl.cumsum(mine.to(tl.int32), 0)
            tl.store(order + seen + rank - 1, base + lanes, mask=mine)
            seen += tl.sum(mine.to(tl.int32), 0)


@triton.jit
def _tile(found, order, n_tile, N, FIELDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr):
    """A tile's expert, its outputs n, the rows of weights for them, its pairs, and which of those exist."""
    at = found + tl.program_id(1) * FIELDS
    n, t = n_tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_T)
    live = t < tl.load(at + 2)
    pair = tl.load(order + tl.load(at + 1) + t, mask=live, other=0)
    return tl.load(at).to(tl.int64), n, tl.minimum(n, N - 1), pair, live


@triton.jit
def _store(acc, out, n, pair, live, N, UPCAST: tl.constexpr):
    at = out + pair.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(at, rounded(acc, out.dtype.element_ty, UPCAST), mask=(n < N)[:, None] & live[None, :])


@triton.jit
def _expert_gated(
    x, x_stride, gate, gate_scales, gate_mins, up, up_scales, up_mins, data_stride, scales_stride, mins_stride,
    order, found, num_tiles, out, N, K, TOP: tl.constexpr, FIELDS: tl.constexpr, ACT: tl.constexpr,
    FORMAT: tl.constexpr, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    if tl.program_id(1) < tl.load(num_tiles):
        expert, n, rows, pair, live = _tile(found, order, tl.program_id(0), N, FIELDS, BLOCK_N, BLOCK_T)
        x_offsets = (pair // TOP).to(tl.int64) * x_stride
        gate, up = gate + expert * data_stride, up + expert * data_stride
        if gate_scales is not None:
            gate_scales, up_scales = gate_scales + expert * scales_stride, up_scales + expert * scales_stride
        if gate_mins is not None:
            gate_mins, up_mins = gate_mins + expert * mins_stride, up_mins + expert * mins_stride
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
        _store(activated(first, ACT) * second, out, n, pair, live, N, UPCAST)


@triton.jit(do_not_specialize=["pairs"])
def _expert_down(
    x, x_stride, data, scales, mins, data_stride, scales_stride, mins_stride, order, found, num_tiles, out,
    pairs, N, K, width, FIELDS: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    if tl.program_id(1) < tl.load(num_tiles):
        expert, n, rows, pair, live = _tile(found, order, tl.program_id(0), N, FIELDS, BLOCK_N, BLOCK_T)
        s = tl.program_id(2)
        if scales is not None:
            scales = scales + expert * scales_stride
        if mins is not None:
            mins = mins + expert * mins_stride
        acc = _chain(
            x, pair.to(tl.int64) * x_stride, live, data + expert * data_stride, scales, mins, rows, K,
            s * width, (s + 1) * width,
            FORMAT, DTYPE, BLOCK_N, BLOCK_T, BLOCK_K, EVEN, UPCAST,
        )  # fmt: skip
        _store(acc, out + s.to(tl.int64) * pairs * N, n, pair, live, N, UPCAST)


@triton.jit(do_not_specialize=["pairs"])
def _combine(
    parts, weights, ids, out, pairs, E, D: tl.constexpr, TOP: tl.constexpr, S: tl.constexpr, HOLDERS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = lanes < D
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(TOP):
        at = (row * TOP + j) * D + lanes
        if HOLDERS > 1:
            at += part_of(tl.load(ids + row * TOP + j), HOLDERS, E).to(tl.int64) * pairs * D
        value = joined(parts, at, mask, pairs.to(tl.int64) * D, S)
        total = total + tl.load(weights + row * TOP + j) * value
    tl.store(out + row * D + lanes, total, mask=mask)


def route(logits: Tensor, ids: Tensor, weights: Tensor, normalise: bool, scales: Tensor | None = None) -> None:
    """The k experts of each row with the largest logits; on equal logits the lower id.

    logits: float32 [T, E], E <= 1024. ids: int32 [T, k], ascending, distinct. weights: float32 [T, k], of the softmax
    over all experts or, with normalise, over the chosen ones; times those experts' scales, float32 [E], if there are
    any. A row with NaN gets ids of experts, and weights of NaN.
    """
    T, E = logits.shape
    assert E <= MOST_EXPERTS and ids.shape[1] <= E and ids.is_contiguous() and weights.is_contiguous()
    launch(
        _route, (T,), logits, scales, ids, weights, logits.stride(0),
        E=E, TOP=ids.shape[1], BLOCK=max(32, triton.next_power_of_2(E)), NORMALISE=normalise, num_warps=1,
        bytes=4 * (logits.numel() + 2 * ids.numel()),
    )  # fmt: skip


def rows_of(pairs: int, experts: int) -> int:
    """The pairs of a tile, from the number of pairs of a step."""
    return 16 if pairs <= 16 * experts else 32


def most_tiles(pairs: int, experts: int) -> int:
    """The tiles that so many pairs may need."""
    return min(experts, pairs) + pairs // rows_of(pairs, experts)


def sort_by_expert(
    ids: Tensor, order: Tensor, found: Tensor, num_tiles: Tensor, *, experts: int, first: int = 0
) -> None:
    """Pairs in the order of their experts.

    ids: int32 [T, k] of `route`. experts, first: how many there are here, and the id of the first; pairs of others are
    left out. Written: order int32 [T * k], the pairs by expert, then ascending; found int32
    [at least `most_tiles`, 3], tiles of pairs that share an expert: (expert, first place in `order`, count); num_tiles
    int32 [1].
    """
    pairs = ids.numel()
    assert ids.is_contiguous() and len(order) == pairs and len(found) >= most_tiles(pairs, experts)
    launch(
        _sort, (experts,), ids, order, found, num_tiles, pairs, first,
        E=experts, EXPERTS=triton.next_power_of_2(experts + 1), BLOCK_T=rows_of(pairs, experts), FIELDS=TILE_FIELDS,
        BLOCK=_BLOCK, num_warps=4, bytes=4 * (2 * pairs + found.numel()),
    )  # fmt: skip


def expert_gated(
    x: Tensor,
    gate: DeviceMatrix,
    up: DeviceMatrix,
    order: Tensor,
    found: Tensor,
    num_tiles: Tensor,
    out: Tensor,
    act: str,
) -> None:
    """out[t * k + j] = act(x[t] gate^T) * (x[t] up^T) of row t's j-th expert.

    x: [T, D], float32 or the matrices' dtype. gate, up: the [I, D] matrices of all experts: planes as in
    `DeviceMatrix`, with a first dimension of experts; of one format, in one segment. order, found, num_tiles: of
    `sort_by_expert`. out: [T * k, I], float32 or rounded to a 16-bit dtype. act: a name that `kernels.activated` knows.
    """
    assert gate.shape == up.shape and gate.format == up.format and gate.segments == up.segments == 1
    assert out.is_contiguous() and x.stride(1) == 1
    pairs, experts, (rows, cols) = len(order), len(gate.data), gate.shape
    tile = _tiles(gate, pairs, experts, 2)
    launch(
        _expert_gated, (triton.cdiv(rows, tile.block_n), most_tiles(pairs, experts)),
        x, x.stride(0), gate.data, gate.scales, gate.mins, up.data, up.scales, up.mins, *_strides(gate),
        order, found, num_tiles, out, rows, cols,
        TOP=pairs // len(x), FIELDS=TILE_FIELDS, ACT=act, **_options(gate, tile),
        bytes=2 * _used(gate, pairs) + x.numel() * x.element_size() + out.numel() * out.element_size(),
    )  # fmt: skip


def expert_down(x: Tensor, down: DeviceMatrix, order: Tensor, found: Tensor, num_tiles: Tensor, out: Tensor) -> None:
    """out[s, p] = the sum of x[p] down^T over segment s, of the expert of pair p.

    x: [T * k, I], of `expert_gated`. down: the [D, I] matrices of all experts, as there, in S segments. out: float32
    [S, T * k, D].
    """
    pairs, experts, (rows, cols) = len(order), len(down.data), down.shape
    assert out.shape == (down.segments, pairs, rows) and out.is_contiguous() and x.stride(1) == 1
    tile = _tiles(down, pairs, experts, 1)
    launch(
        _expert_down, (triton.cdiv(rows, tile.block_n), most_tiles(pairs, experts), down.segments),
        x, x.stride(0), down.data, down.scales, down.mins, *_strides(down), order, found, num_tiles, out,
        pairs, rows, cols, cols // down.segments, FIELDS=TILE_FIELDS, **_options(down, tile),
        bytes=_used(down, pairs) + x.numel() * x.element_size() + out.numel() * 4,
    )  # fmt: skip


def combine(parts: Tensor, weights: Tensor, out: Tensor, ids: Tensor | None = None, experts: int = 0) -> None:
    """out[t] = the sum of weights[t, j] * joined(parts)[t * k + j] over j, ascending, from zero.

    parts: float32 [S, T * k, D], of `expert_down`. weights: float32 [T, k]. out: float32 [T, D]. ids: int32 [T, k], if
    parts are the joined ones of ranks that hold runs of `experts`, of which the pair's holder has its row.
    """
    segments, pairs, D = parts.shape
    holders = segments if ids is not None else 1
    T, top = weights.shape
    assert pairs == T * top and parts.is_contiguous() and weights.is_contiguous() and out.is_contiguous()
    BLOCK = min(1024, triton.next_power_of_2(D))
    launch(
        _combine, (T, triton.cdiv(D, BLOCK)), parts, weights, ids, out, pairs, experts,
        D=D, TOP=top, S=segments // holders, HOLDERS=holders, BLOCK=BLOCK, num_warps=4,
        bytes=4 * (parts.numel() + weights.numel() + out.numel()),
    )  # fmt: skip


def _tiles(weight: DeviceMatrix, pairs: int, experts: int, accumulators: int) -> Tiles:
    """The tiles of ops/linear for as many rows as a tile of pairs holds."""
    tile = tiles(weight, rows_of(pairs, experts), accumulators, on_hip())
    assert tile.block_t == rows_of(pairs, experts)
    return tile


def _strides(weight: DeviceMatrix) -> list[Any]:
    """Elements from one expert to the next in each plane."""
    return [0 if plane is None else plane.stride(0) for plane in (weight.data, weight.scales, weight.mins)]


def _used(weight: DeviceMatrix, pairs: int) -> int:
    """Bytes of the weights that so many pairs need at most."""
    return weight.nbytes * min(pairs, len(weight.data)) // len(weight.data)
