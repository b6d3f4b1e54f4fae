"""Top-k and top-p on a device: launches that find where the kept head of all tokens ends."""

# ruff: noqa: SIM102 - in a kernel, `and` evaluates both operands
from __future__ import annotations

import triton
import triton.language as tl

from kvasir.sampling.triton_numerics import (
    KEY_NAN,
    KEY_OUTSIDE,
    NO_PLACE,
    centred,
    key_at,
    key_of,
    mass_of,
    place_of,
    value_of,
    weights_of,
)
from kvasir.sampling.triton_rows import (
    INVERSE_TEMPERATURE,
    LIMIT,
    TOP_P,
    has_list,
    is_sound,
    logits_of,
    peaks,
    real,
    whole,
)

RANGE = tl.constexpr(64.0)  # of logits below the peak, over which bins are spread at most


@triton.jit
def _bin_scale(low, s, peak, TILES: tl.constexpr, LANES: tl.constexpr, BINS: tl.constexpr):
    """Bins for each unit of distance from the peak: they cover the finite logits, but no more than RANGE."""
    t = tl.arange(0, LANES)
    low_key = tl.min(tl.load(low + s * TILES + t, mask=t < TILES, other=KEY_NAN))
    span = -centred(value_of(low_key), peak)
    return (BINS - 1) / tl.maximum(tl.minimum(span, RANGE), 1e-30)


@triton.jit
def _bin(logit, peak, scale, BINS: tl.constexpr):
    """0 for the peak; never less for a lower logit. All logits beyond the range are in the last."""
    return tl.minimum(-centred(logit, peak) * scale, BINS - 1).to(tl.int32)


@triton.jit
def count_bins(
    logits,
    stride,
    rows,
    settings,
    x_room,
    changed,
    raw,
    best,
    low,
    bin_counts,
    bin_weights,
    vocab,
    TILES: tl.constexpr,
    TILE_LANES: tl.constexpr,
    TILE: tl.constexpr,
    SUB: tl.constexpr,
    BINS: tl.constexpr,
):
    t = tl.program_id(0)
    s = tl.program_id(1)
    row = tl.load(rows + s).to(tl.int64)
    if row >= 0:
        if has_list(settings, row):
            raw_key, top = peaks(raw, best, s, TILES, TILE_LANES)
            if is_sound(raw_key) & is_sound(key_at(top)):
                peak = value_of(key_at(top))
                scale = _bin_scale(low, s, peak, TILES, TILE_LANES, BINS)
                inverse = real(settings, row, INVERSE_TEMPERATURE)
                x = logits_of(logits, stride, x_room, changed, s, vocab)
                last_count = tl.zeros((SUB,), tl.int32)
                last_weight = tl.zeros((SUB,), tl.int64)
                for at in range(0, TILE, SUB):
                    i = t * TILE + at + tl.arange(0, SUB)
                    logit = tl.load(x + i, mask=i < vocab, other=float("-inf"))
                    weight = weights_of(centred(logit, peak) * inverse)
                    b = _bin(logit, peak, scale, BINS)
                    finite = logit > float("-inf")
                    # The last bin may hold most of the vocabulary, so it gets one addition from each tile.
                    tl.atomic_add(bin_counts + s * BINS + b, 1, mask=finite & (b < BINS - 1), sem="relaxed")
                    tl.atomic_add(bin_weights + s * BINS + b, weight, mask=finite & (b < BINS - 1), sem="relaxed")
                    is_last = finite & (b == BINS - 1)
                    last_count += is_last.to(tl.int32)
                    last_weight += tl.where(is_last, weight, 0)
                count = tl.sum(last_count)
                if count > 0:
                    tl.atomic_add(bin_counts + s * BINS + BINS - 1, count, sem="relaxed")
                    tl.atomic_add(bin_weights + s * BINS + BINS - 1, tl.sum(last_weight), sem="relaxed")


@triton.jit
def _span(bin_counts, bin_weights, s, limit, p, BINS: tl.constexpr):
    """The bins in which the list may end, from what all bins hold.

    Returns (first, last, number of tokens in these bins, number and weight of those before, total weight, 0 or else
    top-k's limit). first > last: the list ends nowhere.
    """
    b = tl.arange(0, BINS)
    count = tl.load(bin_counts + s * BINS + b).to(tl.int64)
    weight = tl.load(bin_weights + s * BINS + b)
    count_to = tl.cumsum(count)
    weight_to = tl.cumsum(weight)
    total = tl.sum(weight)
    limit = tl.where(limit < tl.sum(count), limit, 0)
    last = tl.min(tl.where((limit > 0) & (count_to >= limit), b, BINS))
    # Top-p takes its share of what top-k leaves, of which only a lower bound is known yet: the bins before the last.
    known = tl.where(limit > 0, tl.sum(tl.where(b < last, weight, 0)), total)
    first = last
    if p < 1.0:
        first = tl.minimum(last, tl.min(tl.where(weight_to >= mass_of(known, p), b, BINS)))
    if limit == 0:
        last = first
    last = tl.where(first < BINS, last, -1)
    size = tl.sum(tl.where((b >= first) & (b <= last), count, 0))
    return (
        first,
        last,
        size,
        tl.sum(tl.where(b < first, count, 0)),
        tl.sum(tl.where(b < first, weight, 0)),
        total,
        limit,
    )


@triton.jit
def list_tokens(
    logits,
    stride,
    rows,
    settings,
    x_room,
    changed,
    raw,
    best,
    low,
    bin_counts,
    bin_weights,
    found,
    listed,
    vocab,
    TILES: tl.constexpr,
    TILE_LANES: tl.constexpr,
    TILE: tl.constexpr,
    SUB: tl.constexpr,
    BINS: tl.constexpr,
    LISTED: tl.constexpr,
):
    t = tl.program_id(0)
    s = tl.program_id(1)
    row = tl.load(rows + s).to(tl.int64)
    if row >= 0:
        if has_list(settings, row):
            raw_key, top = peaks(raw, best, s, TILES, TILE_LANES)
            if is_sound(raw_key) & is_sound(key_at(top)):
                limit, p = whole(settings, row, LIMIT), real(settings, row, TOP_P)
                first, last, size, _, _, _, _ = _span(bin_counts, bin_weights, s, limit, p, BINS)
                if size <= LISTED:
                    peak = value_of(key_at(top))
                    scale = _bin_scale(low, s, peak, TILES, TILE_LANES, BINS)
                    x = logits_of(logits, stride, x_room, changed, s, vocab)
                    for at in range(0, TILE, SUB):
                        i = t * TILE + at + tl.arange(0, SUB)
                        logit = tl.load(x + i, mask=i < vocab, other=float("-inf"))
                        b = _bin(logit, peak, scale, BINS)
                        chosen = (logit > float("-inf")) & (b >= first) & (b <= last)
                        count = tl.sum(chosen.to(tl.int32))
                        if count > 0:
                            # The order in the list is any; nothing depends on it.
                            start = tl.atomic_add(found + s, count, sem="relaxed")
                            place = start + tl.cumsum(chosen.to(tl.int32)) - 1
                            tl.store(listed + s * LISTED + place, i, mask=chosen)


@triton.jit
def _held(x, peak, inverse, ids, inside):
    """The key and the weight of tokens; KEY_OUTSIDE and 0 for those at -inf."""
    logit = tl.load(x + ids, mask=inside, other=float("-inf"))
    finite = logit > float("-inf")
    weight = tl.where(finite, weights_of(centred(logit, peak) * inverse), 0)
    return tl.where(finite, key_of(logit), KEY_OUTSIDE), weight


@triton.jit
def _count_from(key, keys_N, x, peak, inverse, size, LISTED: tl.constexpr):
    """How many tokens have at least this key. keys_N: of the first LISTED tokens; the others are read."""
    total = tl.sum((keys_N >= key).to(tl.int64))
    for at in range(LISTED, size, LISTED):
        i = at + tl.arange(0, LISTED)
        keys, _ = _held(x, peak, inverse, i, i < size)
        total += tl.sum((keys >= key).to(tl.int64))
    return total


@triton.jit
def _weight_from(key, keys_N, weights_N, x, peak, inverse, size, LISTED: tl.constexpr):
    """The weight of the tokens with at least this key."""
    total = tl.sum(tl.where(keys_N >= key, weights_N, 0))
    for at in range(LISTED, size, LISTED):
        i = at + tl.arange(0, LISTED)
        keys, weights = _held(x, peak, inverse, i, i < size)
        total += tl.sum(tl.where(keys >= key, weights, 0))
    return total


@triton.jit
def _cut_place(key, needed, ids_N, keys_N, x, peak, inverse, size, vocab, LISTED: tl.constexpr):
    """The place of the token that is number `needed`, from 1, of those with this key, by ascending id."""
    low = tl.full((), 0, tl.int32)
    high = low + (vocab - 1)
    while low < high:
        middle = (low + high) // 2
        total = tl.sum(((keys_N == key) & (ids_N <= middle)).to(tl.int64))
        for at in range(LISTED, size, LISTED):
            i = at + tl.arange(0, LISTED)
            keys, _ = _held(x, peak, inverse, i, i < size)
            total += tl.sum(((keys == key) & (i <= middle)).to(tl.int64))
        enough = total >= needed
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return place_of(key.to(tl.int32), low)


@triton.jit
def cut_list(
    logits,
    stride,
    rows,
    settings,
    x_room,
    changed,
    raw,
    best,
    low,
    bin_counts,
    bin_weights,
    listed,
    cuts,
    vocab,
    TILES: tl.constexpr,
    TILE_LANES: tl.constexpr,
    BINS: tl.constexpr,
    LISTED: tl.constexpr,
):
    s = tl.program_id(0)
    row = tl.load(rows + s).to(tl.int64)
    if row >= 0:
        if has_list(settings, row):
            cut = tl.full((), NO_PLACE, tl.int64)
            raw_key, top = peaks(raw, best, s, TILES, TILE_LANES)
            limit, p = whole(settings, row, LIMIT), real(settings, row, TOP_P)
            if is_sound(raw_key) & is_sound(key_at(top)):
                first, last, size_, count, weight, total, limit = _span(bin_counts, bin_weights, s, limit, p, BINS)
                if first <= last:
                    peak = value_of(key_at(top))
                    inverse = real(settings, row, INVERSE_TEMPERATURE)
                    x = logits_of(logits, stride, x_room, changed, s, vocab)
                    ids_N = tl.arange(0, LISTED)
                    size = size_.to(tl.int32)
                    if size <= LISTED:
                        ids_N = tl.load(listed + s * LISTED + ids_N, mask=ids_N < size, other=vocab)
                    else:  # too many for the list: the whole row is read again and again
                        size = size * 0 + vocab
                        count, weight = count * 0, weight * 0
                    keys_N, weights_N = _held(x, peak, inverse, ids_N, ids_N < vocab)
                    # Keys between which the last token's lies, as int64 so that sums of two fit.
                    low_key = tl.min(tl.where(keys_N > KEY_OUTSIDE, keys_N, KEY_NAN)).to(tl.int64)
                    if size > LISTED:
                        t = tl.arange(0, TILE_LANES)
                        low_key = tl.min(tl.load(low + s * TILES + t, mask=t < TILES, other=KEY_NAN)).to(tl.int64)
                    high_key = key_at(top).to(tl.int64)

                    if limit > 0:
                        # The greatest key such that at least `limit` tokens have it or a greater one.
                        high = high_key
                        while low_key < high:
                            middle = (low_key + high + 1) >> 1
                            enough = count + _count_from(middle, keys_N, x, peak, inverse, size, LISTED) >= limit
                            low_key = tl.where(enough, middle, low_key)
                            high = tl.where(enough, high, middle - 1)
                        above = count + _count_from(low_key + 1, keys_N, x, peak, inverse, size, LISTED)
                        cut = _cut_place(low_key, limit - above, ids_N, keys_N, x, peak, inverse, size, vocab, LISTED)
                        total = weight + _weight_from(low_key + 1, keys_N, weights_N, x, peak, inverse, size, LISTED)
                        each = weights_of(centred(value_of(low_key.to(tl.int32)), peak) * inverse)
                        total += (limit - above) * each

                    if p < 1.0:
                        mass = mass_of(total, p)
                        if mass <= total:
                            # The greatest key such that the tokens with it or a greater one weigh at least `mass`.
                            # Top-k cuts the tokens with its own key, which are the last: enough together.
                            high = high_key
                            while low_key < high:
                                middle = (low_key + high + 1) >> 1
                                sum_ = weight + _weight_from(middle, keys_N, weights_N, x, peak, inverse, size, LISTED)
                                low_key = tl.where(sum_ >= mass, middle, low_key)
                                high = tl.where(sum_ >= mass, high, middle - 1)
                            above = weight + _weight_from(
                                low_key + 1, keys_N, weights_N, x, peak, inverse, size, LISTED
                            )
                            each = weights_of(centred(value_of(low_key.to(tl.int32)), peak) * inverse)
                            needed = (mass - above + each - 1) // each
                            cut = _cut_place(low_key, needed, ids_N, keys_N, x, peak, inverse, size, vocab, LISTED)
            tl.store(cuts + s, cut)
