"""The launches that are compiled: of models' steps, and one representative set for each weight format, for experts,
for kinds of attention, for the sampler and for the small kernels. All tensors are torch's `meta` tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvasir.graph.draws import LEVELS, Draws
from kvasir.graph.forward import MAX_ITEMS, WHOLE_FROM
from kvasir.graph.triton import take_rows
from kvasir.layers.tensors import torch_dtype
from kvasir.ops.activation.triton import elementwise
from kvasir.ops.attention.triton import ITEM_FIELDS, attend, plan_attention, tiles_of
from kvasir.ops.collective.triton import pick, side_by_side
from kvasir.ops.columns.triton import take_columns
from kvasir.ops.embedding.triton import lookup
from kvasir.ops.heads.triton import join_heads
from kvasir.ops.launch import Launch, recording
from kvasir.ops.linear.triton import Delta, gated_product, product, whole_product
from kvasir.ops.linear.triton_matrix import (
    CHUNK,
    LAYOUTS,
    DeviceMatrix,
    choose_segments,
    launch_parts,
    most_segments,
    unit,
)
from kvasir.ops.moe.triton import TILE_FIELDS, combine, expert_down, expert_gated, most_tiles, route, sort_by_expert
from kvasir.ops.norm.triton import join_norm, norm
from kvasir.ops.rope.triton import rope, rope_store, store_kv
from kvasir.parallel import cut
from tests.compiled.shapes import BLOCK_SIZE, SHAPES, forward_of

BUCKETS = (1, 16, 32, 64, 128, 256, 512)
FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_SCALES = {  # of a quantized format: the dtype, and how many there are for a row of C chunks
    "Q4_0": (torch.float16, lambda chunks: 4 * chunks),
    "Q8_0": (torch.float16, lambda chunks: 4 * chunks),
    "MXFP4": (torch.uint8, lambda chunks: 4 * chunks),
    "Q4_K": (torch.int16, lambda chunks: 4 * chunks),
    "F8_BLOCK": (torch.float32, lambda chunks: chunks),
    "F8_ROW": (torch.float32, lambda chunks: 1),
    "I8_ROW": (torch.float32, lambda chunks: 1),
}  # fmt: skip


def meta(*shape: int, dtype: str = "float32") -> Tensor:
    kind = getattr(torch, dtype) if dtype.startswith(("int", "uint")) else torch_dtype(dtype)
    return torch.empty(shape, dtype=kind, device="meta")


def matrix(
    format: str, rows: int, cols: int, segments: int = 1, dtype: str = "bfloat16", experts: tuple[int, ...] = ()
) -> DeviceMatrix:
    """A matrix without memory, or those of so many experts; see DeviceMatrix for the planes."""
    if format in FLOATS.values():
        return DeviceMatrix(format, rows, cols, segments, dtype, meta(*experts, rows, cols, dtype=dtype))
    chunks = -(-cols // CHUNK)
    data = meta(*experts, rows, chunks * CHUNK * LAYOUTS[format].bits // 32, dtype="int32")
    kind, count = _SCALES[format]
    scales = torch.empty((*experts, rows, count(chunks)), dtype=kind, device="meta")
    found = DeviceMatrix(format, rows, cols, segments, dtype, data, scales)
    return replace(found, mins=meta(*experts, rows, cols // 256, dtype="int32")) if format == "Q4_K" else found


# -- whole models


def models(dtype: str, shapes: Iterable[str] = SHAPES, buckets: Iterable[int] = BUCKETS) -> None:
    """The steps of dense models with matrices of a float format."""
    for shape in shapes:
        forward = forward_of(shape, dtype, layers=2)
        for bucket in buckets:
            forward.run_rows(bucket)
            forward.run_chosen(min(bucket, 64))


def adapters() -> None:
    """Steps with adapters, and what they add to products of quantized matrices."""
    forward = forward_of("0.6B", "bfloat16", layers=2)
    forward.add_adapters()
    for bucket in BUCKETS:
        forward.run_rows(bucket, adapted=True)
        forward.run_chosen(min(bucket, 64), adapted=True)
    for format in ("Q4_K", "Q8_0"):
        rows, cols = 1024, 4096
        weight = matrix(format, rows, cols, choose_segments(rows, cols, unit(format), True))
        for count in (16, 128):
            x, ids = meta(count, cols, dtype="bfloat16"), meta(count, dtype="int32")
            delta = Delta(meta(count, rows), meta(count, rows), ids)
            both = Delta(meta(2, count, rows), meta(2, count, rows), ids)
            product(x, weight, meta(weight.segments, count, rows), delta=delta)
            whole_product(x, weight, meta(count, rows), delta=delta)
            gate = matrix(format, rows, cols)
            gated_product(x, gate, gate, meta(count, rows, dtype="bfloat16"), "silu", delta=both)


# -- matrices


def products(
    format: str, dtype: str = "bfloat16", buckets: Iterable[int] = BUCKETS,
    widths: Iterable[tuple[int, int]] = ((4096, 4096), (1024, 4096)), inner: int = 12288,
) -> None:  # fmt: skip
    """Products of matrices of a format. widths: outputs and inputs of those in segments. inner: of the gated unit."""
    unsplit = matrix(format, 4096, 4096, 1, dtype)
    for count in buckets:
        for rows, cols in widths:
            weight = matrix(format, rows, cols, choose_segments(rows, cols, unit(format), True), dtype)
            x = meta(count, cols, dtype=dtype)
            if count >= WHOLE_FROM:
                whole_product(x, weight, meta(count, rows))
            else:
                product(x, weight, meta(weight.segments, count, rows))
            whole = matrix(format, rows, cols, most_segments(cols, unit(format)), dtype)
            product(x, whole, meta(launch_parts(rows, whole.segments), count, rows))
        x = meta(count, 4096, dtype=dtype)
        product(x, unsplit, meta(1, count, 4096))
        gate, up = (matrix(format, inner, 4096, 1, dtype) for _ in range(2))
        gated_product(x, gate, up, meta(count, inner, dtype=dtype), "silu")
    product(meta(1, 4096), unsplit, meta(1, 1, 4096), meta(4096))  # inputs in float32, and a bias


def experts(format: str, dtype: str = "bfloat16", counts: Iterable[int] = (1, 16, 512), total: int = 128) -> None:
    """A mixture of experts of width 2048, 768 wide inside, 8 of which compute each row."""
    width, inner, top = 2048, 768, 8
    gate, up = (matrix(format, inner, width, 1, dtype, (total,)) for _ in range(2))
    down = matrix(format, width, inner, choose_segments(width, inner, unit(format), True), dtype, (total,))
    for count in counts:
        pairs = count * top
        ids, weights, order = meta(count, top, dtype="int32"), meta(count, top), meta(pairs, dtype="int32")
        found, number = meta(most_tiles(pairs, total), TILE_FIELDS, dtype="int32"), meta(1, dtype="int32")
        route(meta(count, total), ids, weights, True)
        route(meta(count, total), ids, weights, True, meta(total))
        sort_by_expert(ids, order, found, number, experts=total)
        hidden, parts = meta(pairs, inner, dtype=dtype), meta(down.segments, pairs, width)
        expert_gated(meta(count, width, dtype=dtype), gate, up, order, found, number, hidden, "silu")
        expert_down(hidden, down, order, found, number, parts)
        combine(parts, weights, meta(count, width))
        combine(meta(4, pairs, width), weights, meta(count, width), ids, total)  # of four ranks


# -- attention


def attention(
    heads: int, kv_heads: int, dim: int, value_dim: int = 0, *, dtype: str = "bfloat16", window: int = 0,
    softcap: float = 0.0, sinks: bool = False, block: int = BLOCK_SIZE, stored: str = "",
) -> None:  # fmt: skip
    """One layer's attention, and the plan for it. stored: the cache's dtype, if it is another one; of codes, int8 or
    uint8."""
    value_dim = value_dim or dim
    group = heads // kv_heads
    items, number = meta(MAX_ITEMS, ITEM_FIELDS, dtype="int32"), meta(1, dtype="int32")
    plan_attention(meta(64, 5, dtype="int32"), items, number, group=group, window=window, capacity=MAX_ITEMS)
    stored, coded = stored or dtype, stored in ("int8", "uint8")
    scales = meta(64, kv_heads, block), meta(64, kv_heads, block)
    attend(
        meta(64, heads, dim, dtype=dtype), meta(64, block, kv_heads, dim, dtype=stored),
        meta(64, block, kv_heads, value_dim, dtype=stored), meta(65, 64, dtype="int32"), items, number,
        meta(64, heads, value_dim, dtype=dtype), meta(MAX_ITEMS, kv_heads * tiles_of(group), dtype="int32"),
        meta(MAX_ITEMS, heads, 2), meta(MAX_ITEMS, heads, value_dim), scale=0.1, window=window, softcap=softcap,
        sinks=meta(heads) if sinks else None, scales=scales if coded else None,
    )  # fmt: skip


def attentions() -> None:
    """Kinds of attention of real models."""
    attention(32, 8, 64)  # Llama 3.2 1B
    attention(14, 2, 64)  # Qwen 2.5 0.5B: 7 heads per KV head
    attention(64, 8, 64, window=128, sinks=True)  # gpt-oss
    attention(64, 8, 64, sinks=True)
    attention(32, 8, 128, window=4096)  # Mistral
    attention(64, 4, 128)  # 16 heads per KV head
    attention(71, 1, 64)  # Falcon 7B: one KV head
    attention(128, 1, 128)
    attention(32, 32, 80)  # Phi 2: a width that is no power of two
    attention(32, 32, 96)  # Phi 3
    attention(8, 4, 256, softcap=50.0)  # Gemma 2
    attention(8, 4, 256, softcap=50.0, window=4096)
    attention(8, 1, 256, window=512)  # Gemma 3
    attention(16, 16, 192, 128)  # keys and values of different widths
    attention(16, 8, 128, block=16)  # blocks smaller than a step
    for stored in ("int8", "uint8"):
        for dtype in ("bfloat16", "float16"):
            attention(32, 8, 128, dtype=dtype, stored=stored)
        attention(32, 32, 80, stored=stored)
        attention(8, 4, 256, softcap=50.0, window=4096, stored=stored)
        attention(64, 8, 64, window=128, sinks=True, stored=stored)
    for dtype in ("float16", "float32"):
        attention(32, 8, 128, dtype=dtype)
        attention(8, 4, 256, dtype=dtype, softcap=50.0, window=4096)


# -- the rest


def sampler(vocab: int = 151936) -> None:
    """Every kind of step; one and 16 slots, whose numbers are arguments of no kernel."""
    draws = Draws(meta(257, 4097, dtype="int32"), 16, vocab)
    for slots in (1, 16):
        for level in range(len(LEVELS)):
            draws.run(meta(slots, vocab), level)
        draws.read(meta(slots, vocab))


def small(dtype: str = "bfloat16") -> None:
    """Lookups, rows, norms, rotations, caches and elementwise ops."""
    ids, chosen, rows, positions = (meta(64, dtype="int32") for _ in range(4))
    for format in (FLOATS[dtype], *LAYOUTS):
        lookup(ids, matrix(format, 1024, 4096, 1, dtype), meta(64, 4096))
    lookup(ids, matrix(FLOATS[dtype], 1024, 2304, 1, dtype), meta(64, 2304), scale=48.0)
    lookup(ids, matrix(FLOATS[dtype], 1024, 2304, 1, dtype), meta(64, 2304), or_first=True)
    pick(meta(4, 64, 4096), ids, meta(64, 4096), cut(1024, 4, 16), 16)
    side_by_side(meta(4, 64 * 256), meta(64, 1024), cut(1024, 4, 16))
    take_rows(meta(512, 4096), chosen, meta(64, 4096, dtype=dtype))
    take_rows(meta(512, 4096), chosen, meta(64, 4096))
    join_heads(meta(64, 1, 4096), meta(64, 1, 4096), meta(64, 1, 8192, dtype=dtype))
    join_heads(meta(64, 1, 4096), meta(64, 1, 4096), meta(64, 1, 8192))
    take_columns(meta(64, 4608), 4096, meta(64, 512))
    take_columns(meta(64, 4608), 4096, meta(64, 512, dtype=dtype))
    for width in (256, 1024, 4096, 5120, 16384):
        x, weight = meta(64, width), meta(width)
        for parts in (1, 4, 8):
            join_norm(meta(parts, 64, width), x, weight, meta(64, width, dtype=dtype), 1e-6)
    x, weight, out = meta(64, 4096), meta(4096), meta(64, 4096, dtype=dtype)
    join_norm(meta(4, 64, 4096), x, weight, out, 1e-6, bias=weight, norm_bias=weight)  # LayerNorm
    join_norm(meta(4, 64, 4096), x, weight, out, 1e-6, post_weight=weight)  # Gemma
    join_norm(meta(1, 64, 4096), x, weight, out, 1e-6, post_weight=weight)
    join_norm(meta(4, 64, 4096), x, None, None, 1e-6, total=meta(64, 4096))
    norm(x, weight, out, 1e-6)
    norm(x, weight, out, 1e-6, bias=weight)
    norm(x, None, out, 1e-6)
    norm(meta(3 * 64, 4096), meta(3 * 4096), meta(3 * 64, 4096, dtype=dtype), 1e-6, groups=3)
    norm(meta(64 * 32, 128, dtype=dtype), meta(128), meta(64 * 32, 128, dtype=dtype), 1e-6)
    table, angles = meta(65, 64, dtype="int32"), (meta(4096, 64), meta(4096, 64))
    cache = meta(64, BLOCK_SIZE, 8, 128, dtype=dtype)
    q = meta(64, 32, 128, dtype=dtype)
    heads: Any = {"heads": 32, "kv_heads": 8, "head_dim": 128}
    for parts in (1, 2, 4, 8):
        made = meta(parts, 64, 48 * 128)
        rope_store(made, rows, positions, table, *angles, cache, cache, q, **heads)
        norms: dict[str, Any] = {"q_norm": meta(128), "k_norm": meta(128), "eps": 1e-6}
        rope_store(made, rows, positions, table, *angles, cache, cache, q, bias=meta(48 * 128), **norms, **heads)
    codes, scales = (meta(64, BLOCK_SIZE, 8, 128, dtype=d) for d in ("int8", "uint8")), meta(64, 8, BLOCK_SIZE)
    for stored in codes:
        pair: Any = {"scales": (scales, scales)}
        rope_store(meta(4, 64, 48 * 128), rows, positions, table, *angles, stored, stored, q, **heads, **pair)
        store_kv(meta(64, 8, 128), meta(64, 8, 128), rows, positions, table, stored, stored, **pair)
    rope_store(meta(4, 64, 48 * 128), rows, positions, table, None, None, cache, cache, q, **heads)
    rope(meta(64, 32, 128), positions, *angles, q)
    store_kv(meta(64, 8, 128), meta(64, 8, 128), rows, positions, table, cache, cache)
    y = meta(64, 4096)
    for op in ("add", "multiply", "silu", "gelu", "gelu_tanh", "relu", "sigmoid"):
        elementwise(op, x, y if op in ("add", "multiply") else None, meta(64, 4096))
    elementwise("add_vector", x, weight, meta(64, 4096))
    for op in ("scale", "softcap"):
        elementwise(op, x, None, meta(64, 4096), 30.0)


def _formats() -> None:
    for format in LAYOUTS:
        products(format)


def _precisions() -> None:
    """Quantized matrices with inputs in other dtypes."""
    for dtype in ("float16", "float32"):
        for format in ("Q4_K", "Q8_0", "MXFP4", "F8_BLOCK"):
            products(format, dtype, buckets=(16, 128) if dtype == "float16" else (16,), widths=((1024, 4096),))


def _experts() -> None:
    for format in ("BF16", "Q4_K", "Q8_0", "MXFP4", "F8_BLOCK"):
        experts(format)


SETS: dict[str, Callable[[], None]] = {
    "models": lambda: models("bfloat16"),
    "float16": lambda: models("float16", ["0.6B"]),
    "float32": lambda: models("float32", ["0.6B"]),
    "formats": _formats,
    "precisions": _precisions,
    "experts": _experts,
    "adapters": adapters,
    "attention": attentions,
    "sampler": sampler,
    "small": small,
}


def launches_in(name: str) -> list[Launch]:
    """The launches of a set."""
    with recording(dry=True) as found:
        SETS[name]()
    return found
