"""The token of each slot: the least score by the Gumbel-max rule, or the greatest logit."""

# ruff: noqa: SIM102 - in a kernel, `and` evaluates both operands
from __future__ import annotations

import triton
import triton.language as tl

from kvasir.sampling import device_layout as layout
from kvasir.sampling.triton_numerics import (
    ID_BITS,
    KEY_LOW,
    KEY_NAN,
    NO_PLACE,
    REACH,
    centred,
    id_at,
    key_at,
    key_of,
    log_exponential,
    lower_bound,
    place_of,
    value_of,
    word_of,
    words_from,
)
from kvasir.sampling.triton_rows import (
    BIASES,
    DRAWS,
    INVERSE_TEMPERATURE,
    LEAST_Z,
    SEED_HIGH,
    SEED_LOW,
    has_list,
    is_sound,
    logits_of,
    peaks,
    real,
    whole,
)

NOT_A_NUMBER = tl.constexpr(layout.NOT_A_NUMBER)
ALL_LOW = tl.constexpr(layout.ALL_LOW)
NOTHING_LEFT = tl.constexpr(layout.NOTHING_LEFT)
BIAS_OUTSIDE = tl.constexpr(layout.BIAS_OUTSIDE)


@triton.jit
def draw_tiles(
    logits,
    stride,
    rows,
    settings,
    x_room,
    changed,
    raw,
    best,
    known_S,
    cuts,
    scores,
    drawn,
    vocab,
    TILES: tl.constexpr,
    TILE_LANES: tl.constexpr,
    TILE: tl.constexpr,
    SUB: tl.constexpr,
    LISTS: tl.constexpr,
):
    t = tl.program_id(0)
    s = tl.program_id(1)
    row = tl.load(rows + s).to(tl.int64)
    if row >= 0:
        if whole(settings, row, DRAWS) != 0:
            raw_key, top = peaks(raw, best, s, TILES, TILE_LANES)
            best_score = tl.full((), float("inf"), tl.float64)
            best_id = tl.full((), ID_BITS, tl.int32)
            if is_sound(raw_key) & is_sound(key_at(top)):
                position = tl.load(known_S + s)
                seed_low = whole(settings, row, SEED_LOW)
                seed_high = whole(settings, row, SEED_HIGH)
                inverse = real(settings, row, INVERSE_TEMPERATURE)
                least = real(settings, row, LEAST_Z)
                cut = tl.full((), NO_PLACE, tl.int64)
                if LISTS:
                    if has_list(settings, row):
                        cut = tl.load(cuts + s)
                peak = value_of(key_at(top))
                # The best token's score: no token above it is drawn (`gumbel.draw`).
                bar = tl.min(log_exponential(word_of(position, id_at(top), seed_low, seed_high)))
                x = logits_of(logits, stride, x_room, changed, s, vocab)
                for at in range(0, TILE, SUB):
                    start = t * TILE + at
                    i = start + tl.arange(0, SUB)
                    logit = tl.load(x + i, mask=i < vocab, other=float("-inf"))
                    z = centred(logit, peak) * inverse
                    kept = (z >= least) & (place_of(key_of(logit), i) >= cut)
                    z = tl.where(kept, z, float("-inf"))
                    if tl.max(z) + bar >= REACH:
                        words = words_from(position, start, seed_low, seed_high, SUB)
                        if tl.min(lower_bound(words) - z - bar) <= 0.0:
                            score = log_exponential(words) - z
                            least_score = tl.min(score)
                            token = tl.min(tl.where(score == least_score, i, ID_BITS))
                            best_id = tl.where(least_score < best_score, token, best_id)
                            best_score = tl.minimum(least_score, best_score)
            tl.store(scores + s * TILES + t, best_score)
            tl.store(drawn + s * TILES + t, best_id)


@triton.jit
def finish(
    rows,
    known_S,
    ids,
    ids_stride,
    settings,
    raw,
    best,
    scores,
    drawn,
    tokens,
    errors,
    TILES: tl.constexpr,
    TILE_LANES: tl.constexpr,
    DRAW: tl.constexpr,
):
    s = tl.program_id(0)
    row = tl.load(rows + s).to(tl.int64)
    token = tl.full((), -1, tl.int32)
    error = tl.full((), 0, tl.int32)
    if row >= 0:
        raw_key, top = peaks(raw, best, s, TILES, TILE_LANES)
        error = tl.where(is_sound(key_at(top)), 0, NOTHING_LEFT)
        error = tl.where(whole(settings, row, BIASES) < 0, BIAS_OUTSIDE, error)
        error = tl.where(raw_key == KEY_LOW, ALL_LOW, error)
        error = tl.where(raw_key == KEY_NAN, NOT_A_NUMBER, error).to(tl.int32)
        if error == 0:
            token = id_at(top)
            if DRAW:
                if whole(settings, row, DRAWS) != 0:
                    t = tl.arange(0, TILE_LANES)
                    score = tl.load(scores + s * TILES + t, mask=t < TILES, other=float("inf"))
                    found = tl.load(drawn + s * TILES + t, mask=t < TILES, other=ID_BITS)
                    token = tl.min(tl.where(score == tl.min(score), found, ID_BITS))
            tl.store(ids + row * ids_stride + tl.load(known_S + s), token)
    tl.store(tokens + s, token)
    tl.store(errors + s, error)
