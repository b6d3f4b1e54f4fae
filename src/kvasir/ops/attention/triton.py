"""Triton kernels of attention over a paged cache: one arithmetic for prefill, decoding and everything between.

    keys       0 ........ 256 ....... 512 ......      chunks of CHUNK keys, aligned to absolute position
    queries           |q0 .. q7|q8 .. q15| ...        tiles of ROWS rows: tokens times heads of a KV head

A chunk's state (maximum, sum of weights, weighted values) is computed from nothing, in ascending steps of STEP keys;
the states of a row's chunks are merged in ascending order by `merged`. So it does not matter where a chunk is computed.
One program computes all chunks of a tile or, if that leaves the device idle, only one: the states then go to a
workspace, and the tile's last program to arrive merges them. A row's bits depend on its position and on the keys that
it sees.

    plan_attention      one launch per step and kind of window: pieces -> items, on the device
    attend              one launch per layer

Keys and values may be codes with scales (`triton_codes`). Codes are exact operands; the scales of keys are multiplied
with the scores, those of values with the weights, which takes fewer products than scaling keys and values, and rounds
nothing once more. Weights times scales may be beyond float16, so they are bfloat16 even if queries are float16.

Masked weights are 0 by selection, an empty state leaves the other of a merge as it is, and keys and values that no row
of a tile sees are never read. A NaN among the values of a sequence may spread to the other queries of its tile, but not
to other sequences.

Mathematics: arXiv:1706.03762; the paged cache: arXiv:2309.06180; merging states: arXiv:2205.14135.
Letters: T token rows, H query heads, K KV heads, G query heads per KV head, d width of a key, e of a value, P pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from kvasir.ops.attention.triton_codes import checked_scales, decoded
from kvasir.ops.kernels import begin, rounded
from kvasir.ops.launch import INTERPRETED, for_large_tiles, has_tensor_memory, launch, on_hip

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 256
STEP = 64
ROWS = 32
ITEM_FIELDS = 12
_PROGRAMS = 4 if INTERPRETED else 1024  # of a launch, at most; each computes items at a distance


@triton.jit
def _extent(start, count, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first chunk that queries start .. start + count - 1 see, and the number of chunks from there to the last."""
    low = tl.maximum(start - WINDOW + 1, 0) if WINDOW else start * 0
    return low // CHUNK, tl.where(count > 0, (start + count + CHUNK - 1) // CHUNK - low // CHUNK, 0)


@triton.jit
def _plan(
    pieces, items, num_items, P, capacity,
    MOST: tl.constexpr, PIECE_FIELDS: tl.constexpr, ITEM_FIELDS: tl.constexpr, WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per piece. Whether tiles are split follows from all pieces, so each program looks at all."""
    own = tl.program_id(0)
    p = tl.arange(0, PIECES)
    known = p < P
    start = tl.load(pieces + p * PIECE_FIELDS + 1, mask=known, other=0)
    count = tl.load(pieces + p * PIECE_FIELDS + 2, mask=known, other=0)
    _, chunks = _extent(start, count, WINDOW, CHUNK)
    tiles = (count + TOKENS - 1) // TOKENS
    single = tiles == 1
    parts = tl.where(chunks > 1, count * chunks, 0)
    items_short = tl.where(single, chunks, tiles)
    parts_short = tl.where(single, parts, 0)
    split_all = (tl.sum(tiles * chunks, 0) <= MOST) & (tl.sum(parts, 0) <= capacity)
    split_short = (tl.sum(items_short, 0) <= MOST) & (tl.sum(parts_short, 0) <= capacity)
    each = tl.where(split_all, tiles * chunks, tl.where(split_short, items_short, tiles))
    parts = tl.where(split_all, parts, tl.where(split_short, parts_short, 0))
    first_item = tl.sum(tl.where(p < own, each, 0), 0)
    first_slot = tl.sum(tl.where(p < own, parts, 0), 0)
    if own == 0:
        tl.store(num_items, tl.sum(each, 0))

    row = tl.load(pieces + own * PIECE_FIELDS)
    start = tl.load(pieces + own * PIECE_FIELDS + 1)
    count = tl.load(pieces + own * PIECE_FIELDS + 2)
    token = tl.load(pieces + own * PIECE_FIELDS + 3)
    both = tl.load(pieces + own * PIECE_FIELDS + 4)
    _, chunks = _extent(start, count, WINDOW, CHUNK)
    tiles = (count + TOKENS - 1) // TOKENS
    split = split_all | (split_short & (tiles == 1))
    per_tile = tl.where(split, tl.maximum(chunks, 1), 1)
    end = tl.where((both > 0) & (not CAUSAL), start + count, 0)
    for base in range(0, tiles * per_tile, BLOCK):
        i = base + tl.arange(0, BLOCK)
        tile, chunk = i // per_tile, i % per_tile
        queries = tl.minimum(TOKENS, count - tile * TOKENS)
        first, own_chunks = _extent(start + tile * TOKENS, queries, WINDOW, CHUNK)
        own_chunks = tl.where(end > 0, (end + CHUNK - 1) // CHUNK - first, own_chunks)
        # A tile may see fewer chunks than its piece: items without a chunk are left empty.
        apart = split & (own_chunks > 1)
        begin = tl.where(apart, first + chunk, first)
        stop = tl.where(apart, begin + (chunk < own_chunks).to(tl.int32), first + tl.where(chunk == 0, own_chunks, 0))
        at = items + (first_item + i) * ITEM_FIELDS
        mask = i < tiles * per_tile
        tl.store(at, row, mask=mask)
        tl.store(at + 1, start + tile * TOKENS, mask=mask)
        tl.store(at + 2, queries, mask=mask)
        tl.store(at + 3, token + tile * TOKENS, mask=mask)
        tl.store(at + 4, end, mask=mask)
        tl.store(at + 5, begin, mask=mask)
        tl.store(at + 6, stop, mask=mask)
        tl.store(at + 7, tl.where(apart, own_chunks, 0), mask=mask)
        tl.store(at + 8, first_slot + tile * TOKENS * chunks, mask=mask)
        tl.store(at + 9, chunk, mask=mask)
        tl.store(at + 10, first_item + tile * per_tile, mask=mask)


@triton.jit
def _base(top):
    """What to subtract from scores whose maximum is `top`: of an empty row, 0."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def merged(top, weight, acc, next_top, next_weight, next_acc):
    """The state of two runs of keys. A state is (maximum of the scores [R], sum of the weights [R], weighted sum of the
    values [e, R]), weights relative to the maximum. The empty one (-inf, 0, 0) changes nothing."""
    both = tl.maximum(top, next_top)
    a, b = tl.exp(top - _base(both)), tl.exp(next_top - _base(both))
    acc = tl.fma(acc, tl.broadcast_to(a[None, :], acc.shape), next_acc * b[None, :])
    return both, tl.fma(weight, a, next_weight * b), acc


@triton.jit
def _finish(top, weight, acc, at, head, mask, sinks, out, UPCAST: tl.constexpr):
    """Writes the weighted means [e, R] of a tile to `out`; zeros for rows that see nothing."""
    if sinks is not None:
        sink = tl.load(sinks + head)
        both = tl.maximum(top, sink)
        a = tl.exp(top - _base(both))
        weight = weight * a + tl.exp(sink - _base(both))
        acc = acc * a[None, :]
    mean = acc / tl.where(weight == 0.0, 1.0, weight)[None, :]
    tl.store(out + at, rounded(mean, out.dtype.element_ty, UPCAST), mask=mask)


@triton.jit
def _cached(at, mask, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """A tile of a cache's floats or codes as an operand of tl.dot, with values of DTYPE."""
    x = tl.load(at, mask=mask, other=0)
    if x.dtype.is_int():
        x = decoded(x, DTYPE, UPCAST)
        # Without the selection Triton decodes float32 in the layout of operands, of which a thread holds whole rows.
        return tl.where(mask, x, 0.0) if tl.float32 == DTYPE else x
    return _operand(x, DTYPE, UPCAST)


@triton.jit
def _operand(x, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """A tile as an operand of tl.dot, with values of DTYPE."""
    if UPCAST:
        return rounded(x.to(tl.float32), DTYPE, UPCAST).to(tl.float32)
    if x.dtype == DTYPE:
        return x
    return x.to(tl.float32).to(DTYPE)


@triton.jit
def _columns(tile, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """The columns of a tile, and which of them exist."""
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    if WIDTH % BLOCK == 0:
        return columns, tl.full([BLOCK], True, tl.int1)
    return columns, columns < WIDTH


@triton.jit
def _slots(
    table_row, cache, key, step, seen, stride_block,
    SLOT: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Pointers to the numbers of the keys of a step in a cache of blocks of SIZE tokens."""
    if SIZE % STEP == 0:
        block = tl.load(table_row + step // (SIZE // STEP)).to(tl.int64)
        return cache + block * stride_block + key % SIZE * SLOT
    block = tl.load(table_row + key // SIZE, mask=seen, other=0).to(tl.int64)
    return cache + (block * stride_block + key % SIZE * SLOT)


@triton.jit
def _attend(
    q, k_cache, v_cache, k_scales, v_scales, table, items, num_items, sinks, out, counters, tops, accs,
    scale, softcap, table_stride, k_block, v_block,
    K_SLOT: tl.constexpr, K_HEAD: tl.constexpr, V_SLOT: tl.constexpr, V_HEAD: tl.constexpr, SIZE: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, TILES_E: tl.constexpr,
    ITEM_FIELDS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    G: tl.constexpr = H // K
    TILES_G: tl.constexpr = (G + HEADS - 1) // HEADS
    DTYPE: tl.constexpr = q.dtype.element_ty
    CODED: tl.constexpr = k_scales is not None
    WEIGHTS: tl.constexpr = tl.bfloat16 if CODED and tl.float16 == DTYPE else DTYPE
    kv, tile_g = tl.program_id(1) // TILES_G, tl.program_id(1) % TILES_G
    r = tl.arange(0, ROWS)
    d, in_d = _columns(0, BLOCK_D, D)
    e, in_e = _columns(0 if TILES_E == 1 else tl.program_id(2), BLOCK_E, E)
    keys = tl.arange(0, STEP)
    in_group = tile_g * HEADS + r % HEADS
    head = kv * G + in_group
    for i in range(tl.program_id(0), tl.load(num_items), tl.num_programs(0)):
        item = items + i * ITEM_FIELDS
        first_chunk, stop = tl.load(item + 5), tl.load(item + 6)
        if first_chunk < stop:
            table_row, position = table + tl.load(item) * table_stride, tl.load(item + 1)
            queries, token = tl.load(item + 2), tl.load(item + 3)
            end, chunks = tl.load(item + 4), tl.load(item + 7)
            live = (r // HEADS < queries) & (in_group < G)
            rows = (token + r // HEADS).to(tl.int64) * H + head
            q_mask = live[None, :] & in_d[:, None]
            qt = _operand(tl.load(q + rows[None, :] * D + d[:, None], mask=q_mask, other=0.0), DTYPE, UPCAST)

            # keys that each row sees, and that some row of the tile does
            high = tl.where(live, tl.where(end > 0, end, position + r // HEADS + 1), 0)
            tile_high = tl.where(end > 0, end, position + queries)
            low = position + r // HEADS - WINDOW + 1
            tile_low = tl.maximum(position - WINDOW + 1, 0) if WINDOW else 0

            total_top = tl.full([ROWS], float("-inf"), tl.float32)
            total_weight = tl.zeros([ROWS], tl.float32)
            total = tl.zeros([BLOCK_E, ROWS], tl.float32)
            top, weight, acc = total_top, total_weight, total
            last = (tl.minimum(tile_high, stop * CHUNK) + STEP - 1) // STEP
            for step in range(tl.maximum(tile_low, first_chunk * CHUNK) // STEP, last):
                key = step * STEP + keys
                seen = (key >= tile_low) & (key < tile_high)
                k_from = _slots(table_row, k_cache + kv * K_HEAD, key, step, seen, k_block, K_SLOT, SIZE, STEP)
                k = _cached(k_from[:, None] + d[None, :], seen[:, None] & in_d[None, :], DTYPE, UPCAST)
                score = tl.dot(k, qt, input_precision="ieee")
                if CODED:
                    from_scales = _slots(table_row, k_scales + kv * SIZE, key, step, seen, K * SIZE, 1, SIZE, STEP)
                    score = score * (tl.load(from_scales, mask=seen, other=0.0) * scale)[:, None]
                else:
                    score = score * scale
                if SOFTCAP:
                    # softcap * tanh; exp must not overflow, and NaN must stay
                    score = score / softcap
                    score = tl.exp(2.0 * tl.where(score > 40.0, 40.0, score))
                    score = softcap - 2.0 * softcap / (score + 1.0)
                visible = key[:, None] < high[None, :]
                if WINDOW:
                    visible = visible & (key[:, None] >= low[None, :])
                score = tl.where(visible, score, float("-inf"))
                new_top = tl.maximum(top, tl.max(score, 0))
                p = tl.where(visible, tl.exp(score - _base(new_top)[None, :]), 0.0)
                fade = tl.exp(top - _base(new_top))
                weight = tl.fma(weight, fade, tl.sum(p, 0))
                v_from = _slots(table_row, v_cache + kv * V_HEAD, key, step, seen, v_block, V_SLOT, SIZE, STEP)
                v = _cached(v_from[:, None] + e[None, :], seen[:, None] & in_e[None, :], WEIGHTS, UPCAST)
                if CODED:
                    from_scales = _slots(table_row, v_scales + kv * SIZE, key, step, seen, K * SIZE, 1, SIZE, STEP)
                    p = p * tl.load(from_scales, mask=seen, other=0.0)[:, None]
                    p = tl.where(visible, p, 0.0)
                added = tl.dot(tl.trans(v), _operand(p, WEIGHTS, UPCAST), input_precision="ieee")
                acc = tl.fma(acc, tl.broadcast_to(fade[None, :], acc.shape), added)
                top = new_top
                if ((step + 1) % (CHUNK // STEP) == 0) | (step + 1 == last):
                    total_top, total_weight, total = merged(total_top, total_weight, total, top, weight, acc)
                    top = tl.full([ROWS], float("-inf"), tl.float32)
                    weight = tl.zeros([ROWS], tl.float32)
                    acc = tl.zeros([BLOCK_E, ROWS], tl.float32)

            mask = live[None, :] & in_e[:, None]
            if chunks == 0:
                at = rows[None, :] * E + e[:, None]
                _finish(total_top, total_weight, total, at, head, mask, sinks, out, UPCAST)
            else:
                first_slot, chunk, counter = tl.load(item + 8), tl.load(item + 9), tl.load(item + 10)
                slots = (first_slot + chunk * queries + r // HEADS).to(tl.int64) * H + head
                if tl.program_id(2) == 0:
                    tl.store(tops + slots * 2, total_top, mask=live)
                    tl.store(tops + slots * 2 + 1, total_weight, mask=live)
                tl.store(accs + slots[None, :] * E + e[:, None], total, mask=mask)
                tl.debug_barrier()  # the atomic of one thread must follow the stores of all
                at_counter = counters + counter * (K * TILES_G) + tl.program_id(1)
                arrived = tl.atomic_add(at_counter, 1, sem="acq_rel", scope="gpu")
                if arrived == chunks * TILES_E - 1:
                    for tile in tl.static_range(TILES_E):
                        e, in_e = _columns(tile, BLOCK_E, E)
                        mask = live[None, :] & in_e[:, None]
                        total_top = tl.full([ROWS], float("-inf"), tl.float32)
                        total_weight = tl.zeros([ROWS], tl.float32)
                        total = tl.zeros([BLOCK_E, ROWS], tl.float32)
                        for c in range(chunks):
                            # written by other programs: past the level 1 cache
                            slots = (first_slot + c * queries + r // HEADS).to(tl.int64) * H + head
                            next_top = tl.load(tops + slots * 2, mask=live, other=0.0, cache_modifier=".cg")
                            next_weight = tl.load(tops + slots * 2 + 1, mask=live, other=0.0, cache_modifier=".cg")
                            places = slots[None, :] * E + e[:, None]
                            next_acc = tl.load(accs + places, mask=mask, other=0.0, cache_modifier=".cg")
                            total_top, total_weight, total = merged(
                                total_top, total_weight, total, next_top, next_weight, next_acc
                            )
                        at = rows[None, :] * E + e[:, None]
                        _finish(total_top, total_weight, total, at, head, mask, sinks, out, UPCAST)
                    tl.store(at_counter, 0)


def tiles_of(group: int) -> int:
    """Among how many programs the `group` query heads of a KV head are divided."""
    return triton.cdiv(group, ROWS)


def heads_of(group: int) -> int:
    """The query heads of a tile."""
    return triton.cdiv(group, tiles_of(group))


def tokens_of(group: int) -> int:
    """The query tokens of a tile."""
    return ROWS // heads_of(group)


def least_items(tokens: int, pieces: int, group: int) -> int:
    """The items that a step of at most so many tokens and pieces needs if no tile is split."""
    return tokens // tokens_of(group) + pieces


def plan_attention(
    pieces: Tensor, items: Tensor, num_items: Tensor, *, group: int, window: int = 0, capacity: int = 0,
    causal: bool = False,
) -> None:  # fmt: skip
    """Divides a step's attention into items, for all layers with this window and so many query heads per KV head.

    pieces: int32 [P, 5], the work of a row in the step: (runner row, start position, count, first token row,
    indivisible). Padding pieces have the count 0. The queries of an indivisible piece see all keys before its end.
    window: maximum keys that a query sees, itself included; 0 for all. causal: whether queries see no later keys, also
    those of an indivisible piece.

    Written: items int32 [N, 12], num_items int32 [1]. N must be at least `least_items`. capacity: rows of the workspace
    of `attend` (`tops`, `accs`). Tiles of more than one chunk are split into an item per chunk if all such items fit N
    and the workspace; else only those of pieces that are a single tile; else none.
    """
    P = pieces.shape[0]
    assert pieces.is_contiguous() and items.is_contiguous() and items.shape[1] == ITEM_FIELDS
    launch(
        _plan, (P,),
        pieces, items, num_items, P, capacity,
        MOST=items.shape[0], PIECE_FIELDS=pieces.shape[1], ITEM_FIELDS=ITEM_FIELDS, WINDOW=window, CAUSAL=causal,
        CHUNK=CHUNK, TOKENS=tokens_of(group), PIECES=triton.next_power_of_2(P), BLOCK=128, num_warps=4,
        bytes=4 * (pieces.numel() + items.numel()),
    )  # fmt: skip


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    items: Tensor,
    num_items: Tensor,
    out: Tensor,
    counters: Tensor,
    tops: Tensor,
    accs: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """softmax(q k^T * scale) v of the rows in the items of `plan_attention`; other rows of `out` are left as they are.

    q: [T, H, d], float32, bfloat16 or float16; keys, values and weights are rounded to this dtype before products,
    which are summed in float32. Caches: [blocks, block size, K, d] and [.., e] of any float type. table: int32
    [rows + 1, blocks]; entries for keys outside the window are not read. out: [T, H, e] of any
    float type, rounded to nearest even. window: as in the plan. softcap: if not 0, scores become softcap * tanh(score /
    softcap). sinks: float32 [H], an additional score per head, without a value. scales: float32 [blocks, K, block size]
    of keys and of values, contiguous, for caches of codes: int8, or uint8 for e4m3fn.

    Workspace: counters int32 [N, K * `tiles_of`], zeros at first and after each launch; tops float32 [capacity, H, 2]
    and accs float32 [capacity, H, e], of any content. Launches that run one after another may share it.
    """
    _, H, D = q.shape
    _, size, K, E = v_cache.shape
    assert k_cache.shape[-1] == D and k_cache.stride(3) == 1 and v_cache.stride(3) == 1 and H % K == 0
    assert q.is_contiguous() and out.is_contiguous() and tops.is_contiguous() and accs.is_contiguous()
    group = H // K
    assert counters.shape == (items.shape[0], K * tiles_of(group)) and counters.is_contiguous()
    k_scales, v_scales = checked_scales(scales, k_cache, v_cache)
    tile = _tile(D, E, q.element_size(), softcap != 0.0 or window > 0, scales is not None, size)
    value_tiles = triton.cdiv(E, tile.block_e)
    launch(
        _attend, (max(1, min(items.shape[0], _PROGRAMS // counters.shape[1])), counters.shape[1], value_tiles),
        q, k_cache, v_cache, k_scales, v_scales, table, items, num_items, sinks, out, counters, tops, accs,
        float(scale), float(softcap), table.stride(0), k_cache.stride(0), v_cache.stride(0),
        K_SLOT=k_cache.stride(1), K_HEAD=k_cache.stride(2), V_SLOT=v_cache.stride(1), V_HEAD=v_cache.stride(2),
        SIZE=size, H=H, K=K, HEADS=heads_of(group), D=D, E=E,
        BLOCK_D=tile.block_d, BLOCK_E=tile.block_e, TILES_E=value_tiles,
        ITEM_FIELDS=ITEM_FIELDS, CHUNK=CHUNK, STEP=STEP, ROWS=ROWS, WINDOW=window, SOFTCAP=softcap != 0.0,
        UPCAST=INTERPRETED, num_warps=tile.num_warps, num_stages=tile.num_stages,
        **for_large_tiles(),
        bytes=q.numel() * q.element_size() + out.numel() * out.element_size(),
    )  # fmt: skip


class _Tile(NamedTuple):
    """block_d: width of a key, padded. block_e: width of a tile of values; a program computes one."""

    block_d: int
    block_e: int
    num_warps: int
    num_stages: int


def _tile(D: int, E: int, itemsize: int, special: bool, coded: bool, size: int) -> _Tile:
    """Follows from the GPU, the model's shapes and the cache alone; so that no target's registers spill, nor its shared
    memory overflows. special: whether there is a window or a softcap, which take registers; coded: codes take some
    too. size: tokens of a block; smaller ones than a step's take registers for the blocks of its keys."""
    block_d = max(16, triton.next_power_of_2(D))
    widest = 64 if itemsize == 4 or (block_d > 128 and (special or D % block_d)) else 128
    block_e = min(widest, max(16, triton.next_power_of_2(E)))
    if on_hip():
        return _Tile(block_d, block_e, 4, 1)
    if itemsize == 4:
        return _Tile(block_d, block_e, 16 if block_d > 128 else 8, 1)
    padded = D % block_d or E % block_e  # masks take registers
    if block_d <= 128 and not (padded or coded or special or size % STEP or has_tensor_memory()):
        return _Tile(block_d, block_e, 4, 2)  # two programs fit a processor: 1.6 times as fast as 8 warps on an H100
    return _Tile(block_d, block_e, 8, 1 if padded or (coded and block_d > 128) else 2)
