"""Triton kernels of the rotary embedding and of writing to the paged cache.

`rope_store` does all that lies between the products q, k, v of a layer and its attention. One program computes one head
of one token. Letters: T token rows, S segments, H query heads, K KV heads, d head width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kvasir.ops.attention.triton_codes import checked_scales, quantized
from kvasir.ops.kernels import begin, joined, rounded
from kvasir.ops.launch import INTERPRETED, launch
from kvasir.ops.norm.triton import rms_scale

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _partner(lanes, HALF: tl.constexpr):
    """The dimension that each one is rotated with; itself beyond the rotated ones."""
    return tl.where(lanes < HALF, lanes + HALF, tl.where(lanes < 2 * HALF, lanes - HALF, lanes))


@triton.jit
def _rotated(x, other, lanes, position, cos, sin, HALF: tl.constexpr):
    """x: a head of a token; other: the same in the order of `_partner`. cos, sin: tables [positions, HALF]."""
    angles = position * HALF + tl.where(lanes < HALF, lanes, lanes - HALF)
    turns = lanes < 2 * HALF
    c = tl.load(cos + angles, mask=turns, other=1.0)
    s = tl.load(sin + angles, mask=turns, other=0.0)
    kept, crossed = x * c, other * s
    return tl.where(turns, tl.where(lanes < HALF, kept - crossed, kept + crossed), x)


@triton.jit
def _put(
    x, lanes, mask, cache, scales, table, row, position, head, stride_row, stride_block, stride_slot, stride_head,
    K: tl.constexpr, SIZE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Writes a head of a token of a runner row to a cache, with its scale if it has `scales` [blocks, K, SIZE]. SIZE:
    tokens of a block."""
    block = tl.load(table + row * stride_row + position // SIZE).to(tl.int64)
    to = cache + block * stride_block + (position % SIZE) * stride_slot + head * stride_head + lanes
    if scales is None:
        tl.store(to, rounded(x, cache.dtype.element_ty, UPCAST), mask=mask)
    else:
        codes, scale = quantized(x, mask, cache.dtype.element_ty)
        tl.store(to, codes, mask=mask)
        tl.store(scales + (block * K + head) * SIZE + position % SIZE, scale)


@triton.jit(do_not_specialize=["T"])
def _rope_store(
    parts, bias, q_norm, k_norm, rows, positions, table, cos, sin, k_cache, v_cache, k_scales, v_scales, q_out,
    T, eps, table_stride, k_block, k_slot, k_head, v_block, v_slot, v_head,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr,
    SIZE: tl.constexpr, S: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    WIDTH: tl.constexpr = (H + 2 * K) * D
    lanes = tl.arange(0, BLOCK)
    mask = lanes < D
    start = token * WIDTH + head * D
    stride = T.to(tl.int64) * WIDTH
    x = joined(parts, start + lanes, mask, stride, S)
    if bias is not None:
        x = x + tl.load(bias + head * D + lanes, mask=mask, other=0.0)
    if head < H + K:
        scale = 1.0
        if q_norm is not None:
            scale = rms_scale(x, eps, D)
            weight = tl.where(head < H, tl.load(q_norm + lanes, mask=mask), tl.load(k_norm + lanes, mask=mask))
            x = x * scale * weight
        if cos is not None:
            partner = _partner(lanes, HALF)
            other = joined(parts, start + partner, mask, stride, S)
            if bias is not None:
                other = other + tl.load(bias + head * D + partner, mask=mask, other=0.0)
            if q_norm is not None:
                weight = tl.where(head < H, tl.load(q_norm + partner, mask=mask), tl.load(k_norm + partner, mask=mask))
                other = other * scale * weight
            x = _rotated(x, other, lanes, tl.load(positions + token).to(tl.int64), cos, sin, HALF)
    if head < H:
        tl.store(q_out + (token * H + head) * D + lanes, rounded(x, q_out.dtype.element_ty, UPCAST), mask=mask)
    else:
        row, position = tl.load(rows + token), tl.load(positions + token)
        if head < H + K:
            _put(
                x, lanes, mask, k_cache, k_scales, table, row, position, head - H,
                table_stride, k_block, k_slot, k_head, K, SIZE, UPCAST,
            )  # fmt: skip
        else:
            _put(
                x, lanes, mask, v_cache, v_scales, table, row, position, head - H - K,
                table_stride, v_block, v_slot, v_head, K, SIZE, UPCAST,
            )  # fmt: skip


@triton.jit
def _rope(
    x, positions, cos, sin, out, stride_token, stride_head,
    H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    mask = lanes < D
    start = x + token * stride_token + head * stride_head
    value = tl.load(start + lanes, mask=mask, other=0.0)
    other = tl.load(start + _partner(lanes, HALF), mask=mask, other=0.0)
    # x may be out: no lane is written before all are read
    tl.debug_barrier()
    value = _rotated(value, other, lanes, tl.load(positions + token).to(tl.int64), cos, sin, HALF)
    tl.store(out + (token * H + head) * D + lanes, rounded(value, out.dtype.element_ty, UPCAST), mask=mask)


@triton.jit
def _store_kv(
    k, v, rows, positions, table, k_cache, v_cache, k_scales, v_scales,
    table_stride, k_token, k_from, v_token, v_from, k_block, k_slot, k_head, v_block, v_slot, v_head,
    K: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    row, position = tl.load(rows + token), tl.load(positions + token)
    x = tl.load(k + token * k_token + head * k_from + lanes, mask=lanes < D, other=0.0)
    _put(
        x, lanes, lanes < D, k_cache, k_scales, table, row, position, head, table_stride, k_block, k_slot, k_head,
        K, SIZE, UPCAST,
    )  # fmt: skip
    x = tl.load(v + token * v_token + head * v_from + lanes, mask=lanes < E, other=0.0)
    _put(
        x, lanes, lanes < E, v_cache, v_scales, table, row, position, head, table_stride, v_block, v_slot, v_head,
        K, SIZE, UPCAST,
    )  # fmt: skip


def rope_store(
    parts: Tensor,
    rows_T: Tensor,
    positions_T: Tensor,
    table: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    q_out: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    bias: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Joins the products q, k, v, norms and rotates q and k, writes k and v to the cache and q to q_out: one launch.

    parts: float32 [S, T, (H + 2 K) d], contiguous, S of 1, 2, 4 or 8: all heads of q, then of k, then of v. bias:
    float32 [(H + 2 K) d]. q_norm, k_norm: float32 [d], the weights of an RMSNorm of each head; both or neither. cos,
    sin: float32 [positions, rotated / 2], contiguous: dimension i < rotated / 2 is rotated with i + rotated / 2, those
    from `rotated` on stay; None: no rotation.

    rows, positions: int32 [T]. table: int32 [rows + 1, blocks]; the token's slot is its position in the blocks of its
    row. Caches: [blocks, block size, K, d] of any float type; rounded to nearest even, as is q_out [T, H, d],
    contiguous. Tokens that share a slot (padding ones do, in block 0) leave the values of any of them there.

    scales: float32 [blocks, K, block size] of keys and of values, contiguous, for caches of codes: int8, or uint8 for
    e4m3fn (`triton_codes`).
    """
    segments, T, width = parts.shape
    assert width == (heads + 2 * kv_heads) * head_dim and parts.is_contiguous() and q_out.is_contiguous()
    assert (q_norm is None) == (k_norm is None) and (cos is None) == (sin is None)
    assert k_cache.stride(3) == 1 and v_cache.stride(3) == 1
    k_scales, v_scales = checked_scales(scales, k_cache, v_cache)
    launch(
        _rope_store, (T, heads + 2 * kv_heads),
        parts, bias, q_norm, k_norm, rows_T, positions_T, table, cos, sin, k_cache, v_cache, k_scales, v_scales, q_out,
        T, float(eps), table.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3],
        H=heads, K=kv_heads, D=head_dim, BLOCK=triton.next_power_of_2(head_dim),
        HALF=0 if cos is None else cos.shape[1], SIZE=k_cache.shape[1], S=segments, UPCAST=INTERPRETED, num_warps=1,
        bytes=T * width * 4 * segments
        + T * head_dim * (heads * q_out.element_size() + 2 * kv_heads * k_cache.element_size()),
    )  # fmt: skip


def rope(x: Tensor, positions_T: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Rotates heads, as `rope_store` does. x: float32 [T, heads, d], whose heads may lie apart. out: [T, heads, d],
    contiguous, float32 (it may be x) or rounded."""
    T, heads, dim = x.shape
    assert x.stride(2) == 1 and out.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    launch(
        _rope, (T, heads),
        x, positions_T, cos, sin, out, x.stride(0), x.stride(1),
        H=heads, D=dim, BLOCK=triton.next_power_of_2(dim), HALF=cos.shape[1], UPCAST=INTERPRETED, num_warps=1,
        bytes=x.numel() * (4 + out.element_size()),
    )  # fmt: skip


def store_kv(
    k: Tensor,
    v: Tensor,
    rows_T: Tensor,
    positions_T: Tensor,
    table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Writes keys float32 [T, K, d] and values [T, K, e] to a layer's caches, as `rope_store` does. Their heads may lie
    apart, so k and v may be the same tensor or parts of one."""
    T, heads, _ = k.shape
    assert k.stride(2) == 1 and v.stride(2) == 1 and k_cache.stride(3) == 1 and v_cache.stride(3) == 1
    k_scales, v_scales = checked_scales(scales, k_cache, v_cache)
    launch(
        _store_kv, (T, heads),
        k, v, rows_T, positions_T, table, k_cache, v_cache, k_scales, v_scales,
        table.stride(0), *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
        K=heads, D=k.shape[2], E=v.shape[2], BLOCK=triton.next_power_of_2(max(k.shape[2], v.shape[2])),
        SIZE=k_cache.shape[1], UPCAST=INTERPRETED, num_warps=1,
        bytes=k.numel() * (4 + k_cache.element_size()) + v.numel() * (4 + v_cache.element_size()),
    )  # fmt: skip
