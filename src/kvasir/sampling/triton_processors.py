"""The sampler's first launch on a device: processors, for rows that change their logits, and the best of each tile."""

# ruff: noqa: SIM102 - in a kernel, `and` evaluates both operands
from __future__ import annotations

import triton
import triton.language as tl

from kvasir.sampling.triton_numerics import ID_BITS, KEY_LOW, KEY_NAN, KEY_OUTSIDE, NO_PLACE, key_of, place_of
from kvasir.sampling.triton_rows import (
    BIASES,
    BIASES_AT,
    FREQUENCY,
    LONGEST,
    MIN_TOKENS,
    OCCURRENCE_LAST_N,
    PRESENCE,
    PROMPT_LEN,
    REPETITION,
    REPETITION_LAST_N,
    STOPS,
    WORD_ENDS_AT,
    WORD_IDS_AT,
    WORDS,
    has_list,
    real,
    whole,
)

SEEN = tl.constexpr(-(2**31))  # the bit of a count that says that the repetition penalty applies


@triton.jit
def _forbid_stops(x, first, end, list_, count, LANES: tl.constexpr):
    for at in range(0, count, LANES):
        lane = at + tl.arange(0, LANES)
        token = tl.load(list_ + lane, mask=lane < count, other=-1)
        tl.store(x + token, float("-inf"), mask=(token >= first) & (token < end))


@triton.jit
def _forbid_words(x, first, end, ends, word_ids, count, longest, ids, known, sampled, LANES: tl.constexpr):
    """Forbids the last id of each word whose other ids are the last of the `sampled` ones."""
    for at in range(0, count, LANES):
        lane = at + tl.arange(0, LANES)
        stop = tl.load(ends + lane, mask=lane < count, other=0)
        begin = tl.load(ends + lane - 1, mask=(lane < count) & (lane > 0), other=0)
        matches = (lane < count) & (stop - begin <= sampled + 1)
        for back in range(1, longest):
            place = stop - 1 - back
            compared = matches & (place >= begin)
            wanted = tl.load(word_ids + place, mask=compared, other=0)
            got = tl.load(ids + known - back, mask=known - back >= 0, other=0)
            matches = matches & ((wanted == got) | (place < begin))
        token = tl.load(word_ids + stop - 1, mask=matches, other=-1)
        tl.store(x + token, float("-inf"), mask=matches & (token >= first) & (token < end))


@triton.jit
def _bias(x, first, end, list_, count, LANES: tl.constexpr):
    for at in range(0, count, LANES):
        lane = at + tl.arange(0, LANES)
        token = tl.load(list_ + lane, mask=lane < count, other=-1)
        inside = (token >= first) & (token < end)
        by = tl.load(list_ + count + lane, mask=inside, other=0).to(tl.float32, bitcast=True)
        tl.store(x + token, tl.load(x + token, mask=inside, other=0.0) + by, mask=inside)


@triton.jit
def _window(known, last_n):
    """The first of the last ids; -1: of all."""
    return tl.where(last_n < 0, 0, tl.maximum(known - last_n, 0))


@triton.jit
def _penalise(x, counts, first, end, ids, known, settings, row, TILE: tl.constexpr, SUB: tl.constexpr):
    repetition = real(settings, row, REPETITION).to(tl.float32)
    frequency = real(settings, row, FREQUENCY)
    presence = real(settings, row, PRESENCE)
    occurs = (frequency != 0.0) | (presence != 0.0)
    if (repetition != 1.0) | occurs:
        seen_from = tl.where(repetition != 1.0, _window(known, whole(settings, row, REPETITION_LAST_N)), known)
        last_n = whole(settings, row, OCCURRENCE_LAST_N)
        counted_from = tl.where(last_n == 0, whole(settings, row, PROMPT_LEN), _window(known, last_n))
        counted_from = tl.where(occurs, counted_from, known)
        for at in range(0, TILE, SUB):
            i = first + at + tl.arange(0, SUB)
            tl.store(counts + i, tl.zeros((SUB,), tl.int32), mask=i < end)
        tl.debug_barrier()
        for at in range(tl.minimum(seen_from, counted_from).to(tl.int32), known.to(tl.int32), SUB):
            place = at + tl.arange(0, SUB)
            token = tl.load(ids + place, mask=place < known, other=-1)
            inside = (token >= first) & (token < end)
            tl.atomic_add(counts + token, 1, mask=inside & (place >= counted_from), sem="relaxed")
            tl.atomic_or(counts + token, SEEN, mask=inside & (place >= seen_from), sem="relaxed")
        tl.debug_barrier()
        for at in range(0, TILE, SUB):
            i = first + at + tl.arange(0, SUB)
            logit = tl.load(x + i, mask=i < end, other=0.0)
            # Atomics bypass the first cache.
            cell = tl.load(counts + i, mask=i < end, other=0, cache_modifier=".cg")
            scaled = tl.where(logit > 0.0, tl.div_rn(logit, repetition), logit * repetition)
            logit = tl.where(cell < 0, scaled, logit)
            count = cell & ID_BITS
            less = logit - count.to(tl.float32) * frequency.to(tl.float32) - presence.to(tl.float32)
            tl.store(x + i, tl.where(count > 0, less, logit), mask=i < end)


@triton.jit
def measure_tiles(
    logits,
    stride,
    rows,
    known_S,
    ids_,
    ids_stride,
    settings,
    lists,
    lists_stride,
    masks,
    mask_words,
    mask_S,
    x_room,
    counts_room,
    changed,
    raw,
    best,
    low,
    bin_counts,
    bin_weights,
    found,
    vocab,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    SUB: tl.constexpr,
    BINS: tl.constexpr,
    LANES: tl.constexpr,
    LISTS: tl.constexpr,
    PROCESS: tl.constexpr,
    MASKED: tl.constexpr,
):
    t = tl.program_id(0)
    s = tl.program_id(1)
    row = tl.load(rows + s).to(tl.int64)
    first = t * TILE
    end = tl.minimum(first + TILE, vocab)
    if row >= 0:
        if LISTS:
            if t == 0:
                if has_list(settings, row):
                    b = tl.arange(0, BINS)
                    tl.store(bin_counts + s * BINS + b, tl.zeros((BINS,), tl.int32))
                    tl.store(bin_weights + s * BINS + b, tl.zeros((BINS,), tl.int64))
                    tl.store(found + s, 0)
        mask = tl.full((), -1, tl.int32)
        changes = mask >= 0
        known = tl.load(known_S + s).to(tl.int64)
        sampled = known - whole(settings, row, PROMPT_LEN)
        x = x_room + s.to(tl.int64) * vocab
        if MASKED:
            mask = tl.load(mask_S + s)
        if PROCESS:
            stops = tl.where(sampled < whole(settings, row, MIN_TOKENS), whole(settings, row, STOPS), 0).to(tl.int32)
            biases = whole(settings, row, BIASES).to(tl.int32)
            words = whole(settings, row, WORDS).to(tl.int32)
            penalised = real(settings, row, REPETITION) != 1.0
            penalised = penalised | (real(settings, row, FREQUENCY) != 0.0) | (real(settings, row, PRESENCE) != 0.0)
            changes = (mask >= 0) | (stops > 0) | (biases > 0) | (words > 0) | penalised

        raw_N = tl.full((SUB,), KEY_OUTSIDE, tl.int32)
        low_N = tl.full((SUB,), KEY_NAN, tl.int32)
        best_N = tl.full((SUB,), NO_PLACE, tl.int64)
        for at in range(0, TILE, SUB):
            i = first + at + tl.arange(0, SUB)
            logit = tl.load(logits + s.to(tl.int64) * stride + i, mask=i < end, other=0.0)
            key = tl.where(i < end, key_of(logit), KEY_OUTSIDE)
            raw_N = tl.maximum(raw_N, key)
            best_N = tl.maximum(best_N, tl.where(i < end, place_of(key, i), NO_PLACE))
            low_N = tl.minimum(low_N, tl.where(key > KEY_LOW, key, KEY_NAN))
            if PROCESS:
                if changes:
                    if MASKED:
                        if mask >= 0:
                            word = i >> 5
                            bits = tl.load(
                                masks + mask.to(tl.int64) * mask_words + word,
                                mask=(i < end) & (word < mask_words),
                                other=0,
                            )
                            logit = tl.where(((bits >> (i & 31)) & 1) != 0, logit, float("-inf"))
                    tl.store(x + i, logit, mask=i < end)
        tl.store(raw + s * TILES + t, tl.max(raw_N))

        if PROCESS:
            if t == 0:
                tl.store(changed + s, changes.to(tl.int32))
            if changes:
                ids = ids_ + row * ids_stride
                list_ = lists + row * lists_stride
                tl.debug_barrier()
                _forbid_stops(x, first, end, list_, stops, LANES)
                ends = list_ + whole(settings, row, WORD_ENDS_AT)
                word_ids = list_ + whole(settings, row, WORD_IDS_AT)
                longest = whole(settings, row, LONGEST).to(tl.int32)
                _forbid_words(x, first, end, ends, word_ids, words, longest, ids, known, sampled, LANES)
                tl.debug_barrier()
                _bias(x, first, end, list_ + whole(settings, row, BIASES_AT), biases, LANES)
                tl.debug_barrier()
                counts = counts_room + s.to(tl.int64) * vocab
                _penalise(x, counts, first, end, ids, known, settings, row, TILE, SUB)
                tl.debug_barrier()
                low_N = tl.full((SUB,), KEY_NAN, tl.int32)
                best_N = tl.full((SUB,), NO_PLACE, tl.int64)
                for at in range(0, TILE, SUB):
                    i = first + at + tl.arange(0, SUB)
                    key = key_of(tl.load(x + i, mask=i < end, other=float("-inf")))
                    best_N = tl.maximum(best_N, tl.where(i < end, place_of(key, i), NO_PLACE))
                    low_N = tl.minimum(low_N, tl.where(key > KEY_LOW, key, KEY_NAN))
        else:
            if t == 0:
                tl.store(changed + s, 0)
        tl.store(best + s * TILES + t, tl.max(best_N))
        tl.store(low + s * TILES + t, tl.min(low_N))
