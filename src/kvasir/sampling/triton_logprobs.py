"""Log-probabilities of the sampled tokens: sums, ranks and best tokens of each tile, then of the slot."""

from __future__ import annotations

import triton
import triton.language as tl

from kvasir.sampling.triton_numerics import (
    KEY_OUTSIDE,
    NO_PLACE,
    centred,
    id_at,
    key_at,
    key_of,
    log_weight,
    place_of,
    value_of,
    weights_of,
)
from kvasir.sampling.triton_rows import LOGPROBS, whole


@triton.jit
def describe_tiles(
    logits,
    stride,
    rows,
    settings,
    raw,
    tokens,
    totals,
    ahead,
    bests,
    vocab,
    best_stride,
    TILES: tl.constexpr,
    TILE_LANES: tl.constexpr,
    TILE: tl.constexpr,
    SUB: tl.constexpr,
):
    t = tl.program_id(0)
    s = tl.program_id(1)
    row = tl.load(rows + s).to(tl.int64)
    token = tl.load(tokens + s)
    if (row >= 0) & (token >= 0):
        asked = whole(settings, row, LOGPROBS).to(tl.int32)
        if asked >= 0:
            tiles = tl.arange(0, TILE_LANES)
            peak = value_of(tl.max(tl.load(raw + s * TILES + tiles, mask=tiles < TILES, other=KEY_OUTSIDE)))
            x = logits + s.to(tl.int64) * stride
            own = place_of(key_of(tl.load(x + token)), token)
            total_N = tl.zeros((SUB,), tl.int64)
            ahead_N = tl.zeros((SUB,), tl.int32)
            for at in range(0, TILE, SUB):
                i = t * TILE + at + tl.arange(0, SUB)
                logit = tl.load(x + i, mask=i < vocab, other=float("-inf"))
                total_N += weights_of(centred(logit, peak))
                ahead_N += ((i < vocab) & (place_of(key_of(logit), i) > own)).to(tl.int32)
            tl.store(totals + s * TILES + t, tl.sum(total_N))
            tl.store(ahead + s * TILES + t, tl.sum(ahead_N))
            if asked > 0:
                i = t * TILE + tl.arange(0, TILE)
                key = key_of(tl.load(x + i, mask=i < vocab, other=0.0))
                left = tl.where(i < vocab, place_of(key, i), NO_PLACE)
                for k in range(0, asked):
                    greatest = tl.max(left)
                    tl.store(bests + (s * TILES + t).to(tl.int64) * best_stride + k, greatest)
                    left = tl.where(left == greatest, NO_PLACE, left)


@triton.jit
def describe(
    logits,
    stride,
    rows,
    settings,
    raw,
    tokens,
    totals,
    ahead,
    bests,
    logprobs,
    ranks,
    best_ids,
    best_logprobs,
    vocab,
    best_stride,
    TILES: tl.constexpr,
    TILE_LANES: tl.constexpr,
    BEST_LANES: tl.constexpr,
):
    s = tl.program_id(0)
    row = tl.load(rows + s).to(tl.int64)
    token = tl.load(tokens + s)
    if (row >= 0) & (token >= 0):
        asked = whole(settings, row, LOGPROBS).to(tl.int32)
        if asked >= 0:
            t = tl.arange(0, TILE_LANES)
            peak = value_of(tl.max(tl.load(raw + s * TILES + t, mask=t < TILES, other=KEY_OUTSIDE)))
            log_total = log_weight(tl.sum(tl.load(totals + s * TILES + t, mask=t < TILES, other=0)))
            own = tl.load(logits + s.to(tl.int64) * stride + token)
            tl.store(logprobs + s, (centred(own, peak) - log_total).to(tl.float32))
            tl.store(ranks + s, tl.sum(tl.load(ahead + s * TILES + t, mask=t < TILES, other=0)) + 1)
            if asked > 0:
                k = tl.arange(0, BEST_LANES)
                count = tl.minimum(asked, vocab)
                # The best that each tile has left; its others come after it.
                at = tl.zeros((TILE_LANES,), tl.int32)
                places = tl.full((BEST_LANES,), NO_PLACE, tl.int64)
                lists = bests + (s * TILES + t).to(tl.int64) * best_stride
                for number in range(0, count):
                    heads = tl.load(lists + at, mask=(t < TILES) & (at < asked), other=NO_PLACE)
                    greatest = tl.max(heads)
                    places = tl.where(k == number, greatest, places)
                    at = tl.where(heads == greatest, at + 1, at)
                values = centred(value_of(key_at(places)), peak) - log_total
                tl.store(best_ids + s.to(tl.int64) * best_stride + k, id_at(places), mask=k < count)
                tl.store(best_logprobs + s.to(tl.int64) * best_stride + k, values.to(tl.float32), mask=k < count)
