"""The sampler on a device: from float32 logits to tokens, with the bits of the reference (sampler.py).

    measure_tiles    greatest logits of each tile; processors first, for rows that change their logits
    count_bins       for top-k and top-p: the number and weight of the tokens in each of 2048 ranges of logits
    list_tokens      lists the tokens of the ranges in which the kept head of all tokens may end
    cut_list         finds the head's last token
    draw_tiles       of each tile, the token with the least score (gumbel.py)
    finish           the token; it is written to the row's ids, too
    describe_tiles   log-probabilities: the sums, ranks and best tokens of each tile
    describe         log-probabilities of the slot

A step makes those launches that some of its rows need: 2 if all are greedy, 3 without top-k, top-p and
log-probabilities, 8 at most. Grids depend only on the number of slots, so the launches can be captured in a graph. Each
row takes part in what its own parameters ask for. Tiles are joined by maxima and by sums of integers, exact in any
order; floats are combined as in numerics.py, by the same IEEE operations in float64.

Letters: S slots, V vocabulary, T tiles, L listed tokens, K best tokens.
"""

# ruff: noqa: SIM102 - in a kernel, `and` evaluates both operands
from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kvasir.ops.launch import INTERPRETED, launch
from kvasir.sampling import device_layout as layout
from kvasir.sampling.device_layout import BINS, LISTED, Column
from kvasir.sampling.rows import FRACTION_BITS

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.sampling.device_state import Logprobs, Needs, SamplerState, Workspace

WIDTH = tl.constexpr(layout.WIDTH)
DRAWS = tl.constexpr(int(Column.DRAWS))
LIMIT = tl.constexpr(int(Column.LIMIT))
TOP_P = tl.constexpr(int(Column.TOP_P))
LEAST_Z = tl.constexpr(int(Column.LEAST_Z))
INVERSE_TEMPERATURE = tl.constexpr(int(Column.INVERSE_TEMPERATURE))
SEED_LOW = tl.constexpr(int(Column.SEED_LOW))
SEED_HIGH = tl.constexpr(int(Column.SEED_HIGH))
PROMPT_LEN = tl.constexpr(int(Column.PROMPT_LEN))
LOGPROBS = tl.constexpr(int(Column.LOGPROBS))
MIN_TOKENS = tl.constexpr(int(Column.MIN_TOKENS))
STOPS = tl.constexpr(int(Column.STOPS))
BIASES = tl.constexpr(int(Column.BIASES))
WORDS = tl.constexpr(int(Column.WORDS))
LONGEST = tl.constexpr(int(Column.LONGEST))
BIASES_AT = tl.constexpr(int(Column.BIASES_AT))
WORD_ENDS_AT = tl.constexpr(int(Column.WORD_ENDS_AT))
WORD_IDS_AT = tl.constexpr(int(Column.WORD_IDS_AT))
REPETITION = tl.constexpr(int(Column.REPETITION))
REPETITION_LAST_N = tl.constexpr(int(Column.REPETITION_LAST_N))
FREQUENCY = tl.constexpr(int(Column.FREQUENCY))
PRESENCE = tl.constexpr(int(Column.PRESENCE))
OCCURRENCE_LAST_N = tl.constexpr(int(Column.OCCURRENCE_LAST_N))

NOT_A_NUMBER = tl.constexpr(layout.NOT_A_NUMBER)
ALL_LOW = tl.constexpr(layout.ALL_LOW)
NOTHING_LEFT = tl.constexpr(layout.NOTHING_LEFT)
BIAS_OUTSIDE = tl.constexpr(layout.BIAS_OUTSIDE)

# Keys: int32 in the order of float32 values. A NaN's is the greatest.
KEY_OUTSIDE = tl.constexpr(-(2**31))  # of lanes beyond the vocabulary, below that of -inf
KEY_LOW = tl.constexpr(-0x7F800001)  # of -inf
KEY_HIGH = tl.constexpr(0x7F800000)  # of +inf
KEY_NAN = tl.constexpr(0x7FFFFFFF)
# Places: int64, distinct, descending in the order of tokens: a key above the complement of the id.
NO_PLACE = tl.constexpr(-(2**63))
ID_BITS = tl.constexpr(0x7FFFFFFF)
SEEN = tl.constexpr(-(2**31))  # the bit of a count that says that the repetition penalty applies
RANGE = tl.constexpr(64.0)  # of logits below the peak, over which bins are spread at most
LIST_LANES = 128

# As in numerics.py and gumbel.py.
LN2_HIGH = tl.constexpr(float.fromhex("0x1.62e42fee00000p-1"))
LN2_LOW = tl.constexpr(float.fromhex("0x1.a39ef35793c76p-33"))
LOG2_E = tl.constexpr(float.fromhex("0x1.71547652b82fep+0"))
LN2 = tl.constexpr(math.log(2))
SQRT_HALF_BITS = tl.constexpr(0x3FE6A09E667F3BCD)
EXPONENT_BIAS = tl.constexpr(1023)
MANTISSA_BITS = tl.constexpr(52)
FRACTION = tl.constexpr(FRACTION_BITS)
UNIT = tl.constexpr(2.0**-FRACTION_BITS)
ROUNDING = tl.constexpr(1.5 * 2.0**52)
E9, E8, E7, E6, E5, E4, E3, E2, E1, E0 = (tl.constexpr(1.0 / math.factorial(i)) for i in range(9, -1, -1))
L9, L8, L7, L6, L5, L4, L3, L2, L1, L0 = (tl.constexpr(1.0 / (2 * i + 1)) for i in range(9, -1, -1))
SLACK = tl.constexpr(1e-9)
REACH = tl.constexpr(-33 * math.log(2) - 1e-9)


# ---- arithmetic ----


@triton.jit
def _horner(x, c9, c8, c7, c6, c5, c4, c3, c2, c1, c0):
    result = (x * c9 + c8) * x
    result = (result + c7) * x
    result = (result + c6) * x
    result = (result + c5) * x
    result = (result + c4) * x
    result = (result + c3) * x
    result = (result + c2) * x
    result = (result + c1) * x
    return result + c0


@triton.jit
def _rounded(x):
    """To the nearest integer, ties to even, of float64 below 2^51."""
    return (x + ROUNDING) - ROUNDING


@triton.jit
def _weights(z):
    """e^z of float64 z <= 0 as int64 in units of 2^-40."""
    z = tl.maximum(z, -30.0)
    n = _rounded(z * LOG2_E)
    r = (z - n * LN2_HIGH) - n * LN2_LOW
    power = ((n.to(tl.int64) + (EXPONENT_BIAS + FRACTION)) << MANTISSA_BITS).to(tl.float64, bitcast=True)
    return _rounded(_horner(r, E9, E8, E7, E6, E5, E4, E3, E2, E1, E0) * power).to(tl.int64)


@triton.jit
def _log(x):
    """ln x of positive normal float64 numbers."""
    bits = x.to(tl.int64, bitcast=True)
    n = (bits - SQRT_HALF_BITS) >> MANTISSA_BITS
    f = (bits - (n << MANTISSA_BITS)).to(tl.float64, bitcast=True) - 1.0
    s = f / (f + 2.0)
    series = _horner(s * s, L9, L8, L7, L6, L5, L4, L3, L2, L1, L0) * s * 2.0
    n = n.to(tl.float64)
    return (series + n * LN2_LOW) + n * LN2_HIGH


@triton.jit
def _log_weight(weight):
    return _log(weight.to(tl.float64) * UNIT)


@triton.jit
def _mass_of(total, p):
    """The fraction p of int64 weights, rounded up, at least 1."""
    return tl.maximum(tl.ceil(total.to(tl.float64) * p).to(tl.int64), 1)


@triton.jit
def _centred(x, peak):
    """x - peak in float64, at most 0."""
    x = tl.where(x == 0.0, 0.0, x).to(tl.float64)
    return tl.minimum(x - tl.minimum(peak.to(tl.float64), 1e300), 0.0)


@triton.jit
def _key(x):
    """int32 in the order of float32 values; -0 as 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, KEY_NAN, key)


@triton.jit
def _value(key):
    """The float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _place(key, ids):
    return (key.to(tl.int64) << 32) + (ids ^ ID_BITS)


@triton.jit
def _key_at(place):
    return (place >> 32).to(tl.int32)


@triton.jit
def _id_at(place):
    return (place & ID_BITS).to(tl.int32) ^ ID_BITS


# ---- noise ----


@triton.jit
def _multiply(constant, x):
    """High and low word of the product of uint32 numbers."""
    product = x.to(tl.uint64) * constant
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def _philox(position, block, low, high):
    """The words of four neighbouring tokens, uint32, of the shape of `block`. low, high: of the seed."""
    c1 = block.to(tl.uint32)
    c0 = c1 * 0 + position.to(tl.uint32)
    c2 = c1 * 0
    c3 = c2
    k0 = c2 + low.to(tl.uint32)
    k1 = c2 + high.to(tl.uint32)
    first = tl.full(c1.shape, 0xD2511F53, tl.uint64)
    second = tl.full(c1.shape, 0xCD9E8D57, tl.uint64)
    golden = tl.full(c1.shape, 0x9E3779B9, tl.uint32)
    root = tl.full(c1.shape, 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = _multiply(first, c0)
        high1, low1 = _multiply(second, c2)
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 = k0 + golden
        k1 = k1 + root
    return c0, c1, c2, c3


@triton.jit
def _words(position, start, low, high, N: tl.constexpr):
    """[N] words of the tokens from `start` on, a multiple of 4."""
    w0, w1, w2, w3 = _philox(position, start // 4 + tl.arange(0, N // 4), low, high)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def _word(position, token, low, high):
    """[1] the word of one token."""
    w0, w1, w2, w3 = _philox(position, (token >> 2) + tl.zeros((1,), tl.int32), low, high)
    lane = token & 3
    return tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))


@triton.jit
def _log_exponential(words):
    one_minus_u = (4294967295.5 - words.to(tl.int64).to(tl.float64)) * 2.3283064365386963e-10
    return _log(-_log(one_minus_u))


@triton.jit
def _lower_bound(words):
    """Below log(e) of each word."""
    u = (words.to(tl.int64).to(tl.float64) + 0.5) * 2.3283064365386963e-10
    bits = u.to(tl.int64, bitcast=True).to(tl.float64)
    return (bits * 2.220446049250313e-16 - EXPONENT_BIAS) * LN2 - SLACK


# ---- what kernels read of a row ----


@triton.jit
def _whole(settings, row, COLUMN: tl.constexpr):
    return tl.load(settings + row * WIDTH + COLUMN)


@triton.jit
def _real(settings, row, COLUMN: tl.constexpr):
    return tl.load(settings + row * WIDTH + COLUMN).to(tl.float64, bitcast=True)


@triton.jit
def _peaks(raw, best, s, TILES: tl.constexpr, LANES: tl.constexpr):
    """The key of the greatest raw logit, and the place of the best processed one."""
    t = tl.arange(0, LANES)
    raw_key = tl.max(tl.load(raw + s * TILES + t, mask=t < TILES, other=KEY_OUTSIDE))
    place = tl.max(tl.load(best + s * TILES + t, mask=t < TILES, other=NO_PLACE))
    return raw_key, place


@triton.jit
def _is_sound(key):
    return (key > KEY_LOW) & (key <= KEY_HIGH)


@triton.jit
def _has_list(settings, row):
    """Whether top-k or top-p ends the row's list of tokens."""
    some = (_whole(settings, row, LIMIT) > 0) | (_real(settings, row, TOP_P) < 1.0)
    return (_whole(settings, row, DRAWS) != 0) & some


@triton.jit
def _logits_of(logits, stride, x_room, changed, s, vocab):
    """Pointer to a slot's processed logits."""
    base = logits + s.to(tl.int64) * stride
    if tl.load(changed + s) != 0:
        base = x_room + s.to(tl.int64) * vocab
    return base


# ---- measure_tiles ----


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
    repetition = _real(settings, row, REPETITION).to(tl.float32)
    frequency = _real(settings, row, FREQUENCY)
    presence = _real(settings, row, PRESENCE)
    occurs = (frequency != 0.0) | (presence != 0.0)
    if (repetition != 1.0) | occurs:
        seen_from = tl.where(repetition != 1.0, _window(known, _whole(settings, row, REPETITION_LAST_N)), known)
        last_n = _whole(settings, row, OCCURRENCE_LAST_N)
        counted_from = tl.where(last_n == 0, _whole(settings, row, PROMPT_LEN), _window(known, last_n))
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
                if _has_list(settings, row):
                    b = tl.arange(0, BINS)
                    tl.store(bin_counts + s * BINS + b, tl.zeros((BINS,), tl.int32))
                    tl.store(bin_weights + s * BINS + b, tl.zeros((BINS,), tl.int64))
                    tl.store(found + s, 0)
        mask = tl.full((), -1, tl.int32)
        changes = mask >= 0
        known = tl.load(known_S + s).to(tl.int64)
        sampled = known - _whole(settings, row, PROMPT_LEN)
        x = x_room + s.to(tl.int64) * vocab
        if MASKED:
            mask = tl.load(mask_S + s)
        if PROCESS:
            stops = tl.where(sampled < _whole(settings, row, MIN_TOKENS), _whole(settings, row, STOPS), 0).to(tl.int32)
            biases = _whole(settings, row, BIASES).to(tl.int32)
            words = _whole(settings, row, WORDS).to(tl.int32)
            penalised = _real(settings, row, REPETITION) != 1.0
            penalised = penalised | (_real(settings, row, FREQUENCY) != 0.0) | (_real(settings, row, PRESENCE) != 0.0)
            changes = (mask >= 0) | (stops > 0) | (biases > 0) | (words > 0) | penalised

        raw_N = tl.full((SUB,), KEY_OUTSIDE, tl.int32)
        low_N = tl.full((SUB,), KEY_NAN, tl.int32)
        best_N = tl.full((SUB,), NO_PLACE, tl.int64)
        for at in range(0, TILE, SUB):
            i = first + at + tl.arange(0, SUB)
            logit = tl.load(logits + s.to(tl.int64) * stride + i, mask=i < end, other=0.0)
            key = tl.where(i < end, _key(logit), KEY_OUTSIDE)
            raw_N = tl.maximum(raw_N, key)
            best_N = tl.maximum(best_N, tl.where(i < end, _place(key, i), NO_PLACE))
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
                ends = list_ + _whole(settings, row, WORD_ENDS_AT)
                word_ids = list_ + _whole(settings, row, WORD_IDS_AT)
                longest = _whole(settings, row, LONGEST).to(tl.int32)
                _forbid_words(x, first, end, ends, word_ids, words, longest, ids, known, sampled, LANES)
                tl.debug_barrier()
                _bias(x, first, end, list_ + _whole(settings, row, BIASES_AT), biases, LANES)
                tl.debug_barrier()
                counts = counts_room + s.to(tl.int64) * vocab
                _penalise(x, counts, first, end, ids, known, settings, row, TILE, SUB)
                tl.debug_barrier()
                low_N = tl.full((SUB,), KEY_NAN, tl.int32)
                best_N = tl.full((SUB,), NO_PLACE, tl.int64)
                for at in range(0, TILE, SUB):
                    i = first + at + tl.arange(0, SUB)
                    key = _key(tl.load(x + i, mask=i < end, other=float("-inf")))
                    best_N = tl.maximum(best_N, tl.where(i < end, _place(key, i), NO_PLACE))
                    low_N = tl.minimum(low_N, tl.where(key > KEY_LOW, key, KEY_NAN))
        else:
            if t == 0:
                tl.store(changed + s, 0)
        tl.store(best + s * TILES + t, tl.max(best_N))
        tl.store(low + s * TILES + t, tl.min(low_N))


# ---- count_bins, list_tokens, cut_list: where the head of the tokens ends ----


@triton.jit
def _bin_scale(low, s, peak, TILES: tl.constexpr, LANES: tl.constexpr, BINS: tl.constexpr):
    """Bins for each unit of distance from the peak: they cover the finite logits, but no more than RANGE."""
    t = tl.arange(0, LANES)
    low_key = tl.min(tl.load(low + s * TILES + t, mask=t < TILES, other=KEY_NAN))
    span = -_centred(_value(low_key), peak)
    return (BINS - 1) / tl.maximum(tl.minimum(span, RANGE), 1e-30)


@triton.jit
def _bin(logit, peak, scale, BINS: tl.constexpr):
    """0 for the peak; never less for a lower logit. All logits beyond the range are in the last."""
    return tl.minimum(-_centred(logit, peak) * scale, BINS - 1).to(tl.int32)


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
        if _has_list(settings, row):
            raw_key, top = _peaks(raw, best, s, TILES, TILE_LANES)
            if _is_sound(raw_key) & _is_sound(_key_at(top)):
                peak = _value(_key_at(top))
                scale = _bin_scale(low, s, peak, TILES, TILE_LANES, BINS)
                inverse = _real(settings, row, INVERSE_TEMPERATURE)
                x = _logits_of(logits, stride, x_room, changed, s, vocab)
                last_count = tl.zeros((SUB,), tl.int32)
                last_weight = tl.zeros((SUB,), tl.int64)
                for at in range(0, TILE, SUB):
                    i = t * TILE + at + tl.arange(0, SUB)
                    logit = tl.load(x + i, mask=i < vocab, other=float("-inf"))
                    weight = _weights(_centred(logit, peak) * inverse)
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
        first = tl.minimum(last, tl.min(tl.where(weight_to >= _mass_of(known, p), b, BINS)))
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
        if _has_list(settings, row):
            raw_key, top = _peaks(raw, best, s, TILES, TILE_LANES)
            if _is_sound(raw_key) & _is_sound(_key_at(top)):
                limit, p = _whole(settings, row, LIMIT), _real(settings, row, TOP_P)
                first, last, size, _, _, _, _ = _span(bin_counts, bin_weights, s, limit, p, BINS)
                if size <= LISTED:
                    peak = _value(_key_at(top))
                    scale = _bin_scale(low, s, peak, TILES, TILE_LANES, BINS)
                    x = _logits_of(logits, stride, x_room, changed, s, vocab)
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
    weight = tl.where(finite, _weights(_centred(logit, peak) * inverse), 0)
    return tl.where(finite, _key(logit), KEY_OUTSIDE), weight


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
def _place_of(key, needed, ids_N, keys_N, x, peak, inverse, size, vocab, LISTED: tl.constexpr):
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
    return _place(key.to(tl.int32), low)


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
        if _has_list(settings, row):
            cut = tl.full((), NO_PLACE, tl.int64)
            raw_key, top = _peaks(raw, best, s, TILES, TILE_LANES)
            limit, p = _whole(settings, row, LIMIT), _real(settings, row, TOP_P)
            if _is_sound(raw_key) & _is_sound(_key_at(top)):
                first, last, size_, count, weight, total, limit = _span(bin_counts, bin_weights, s, limit, p, BINS)
                if first <= last:
                    peak = _value(_key_at(top))
                    inverse = _real(settings, row, INVERSE_TEMPERATURE)
                    x = _logits_of(logits, stride, x_room, changed, s, vocab)
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
                    high_key = _key_at(top).to(tl.int64)

                    if limit > 0:
                        # The greatest key such that at least `limit` tokens have it or a greater one.
                        high = high_key
                        while low_key < high:
                            middle = (low_key + high + 1) >> 1
                            enough = count + _count_from(middle, keys_N, x, peak, inverse, size, LISTED) >= limit
                            low_key = tl.where(enough, middle, low_key)
                            high = tl.where(enough, high, middle - 1)
                        above = count + _count_from(low_key + 1, keys_N, x, peak, inverse, size, LISTED)
                        cut = _place_of(low_key, limit - above, ids_N, keys_N, x, peak, inverse, size, vocab, LISTED)
                        total = weight + _weight_from(low_key + 1, keys_N, weights_N, x, peak, inverse, size, LISTED)
                        each = _weights(_centred(_value(low_key.to(tl.int32)), peak) * inverse)
                        total += (limit - above) * each

                    if p < 1.0:
                        mass = _mass_of(total, p)
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
                            each = _weights(_centred(_value(low_key.to(tl.int32)), peak) * inverse)
                            needed = (mass - above + each - 1) // each
                            cut = _place_of(low_key, needed, ids_N, keys_N, x, peak, inverse, size, vocab, LISTED)
            tl.store(cuts + s, cut)


# ---- draw_tiles ----


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
        if _whole(settings, row, DRAWS) != 0:
            raw_key, top = _peaks(raw, best, s, TILES, TILE_LANES)
            best_score = tl.full((), float("inf"), tl.float64)
            best_id = tl.full((), ID_BITS, tl.int32)
            if _is_sound(raw_key) & _is_sound(_key_at(top)):
                position = tl.load(known_S + s)
                seed_low = _whole(settings, row, SEED_LOW)
                seed_high = _whole(settings, row, SEED_HIGH)
                inverse = _real(settings, row, INVERSE_TEMPERATURE)
                least = _real(settings, row, LEAST_Z)
                cut = tl.full((), NO_PLACE, tl.int64)
                if LISTS:
                    if _has_list(settings, row):
                        cut = tl.load(cuts + s)
                peak = _value(_key_at(top))
                # The best token's score: no token above it is drawn (`gumbel.draw`).
                bar = tl.min(_log_exponential(_word(position, _id_at(top), seed_low, seed_high)))
                x = _logits_of(logits, stride, x_room, changed, s, vocab)
                for at in range(0, TILE, SUB):
                    start = t * TILE + at
                    i = start + tl.arange(0, SUB)
                    logit = tl.load(x + i, mask=i < vocab, other=float("-inf"))
                    z = _centred(logit, peak) * inverse
                    kept = (z >= least) & (_place(_key(logit), i) >= cut)
                    z = tl.where(kept, z, float("-inf"))
                    if tl.max(z) + bar >= REACH:
                        words = _words(position, start, seed_low, seed_high, SUB)
                        if tl.min(_lower_bound(words) - z - bar) <= 0.0:
                            score = _log_exponential(words) - z
                            least_score = tl.min(score)
                            token = tl.min(tl.where(score == least_score, i, ID_BITS))
                            best_id = tl.where(least_score < best_score, token, best_id)
                            best_score = tl.minimum(least_score, best_score)
            tl.store(scores + s * TILES + t, best_score)
            tl.store(drawn + s * TILES + t, best_id)


# ---- finish ----


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
        raw_key, top = _peaks(raw, best, s, TILES, TILE_LANES)
        error = tl.where(_is_sound(_key_at(top)), 0, NOTHING_LEFT)
        error = tl.where(_whole(settings, row, BIASES) < 0, BIAS_OUTSIDE, error)
        error = tl.where(raw_key == KEY_LOW, ALL_LOW, error)
        error = tl.where(raw_key == KEY_NAN, NOT_A_NUMBER, error).to(tl.int32)
        if error == 0:
            token = _id_at(top)
            if DRAW:
                if _whole(settings, row, DRAWS) != 0:
                    t = tl.arange(0, TILE_LANES)
                    score = tl.load(scores + s * TILES + t, mask=t < TILES, other=float("inf"))
                    found = tl.load(drawn + s * TILES + t, mask=t < TILES, other=ID_BITS)
                    token = tl.min(tl.where(score == tl.min(score), found, ID_BITS))
            tl.store(ids + row * ids_stride + tl.load(known_S + s), token)
    tl.store(tokens + s, token)
    tl.store(errors + s, error)


# ---- describe_tiles, describe: log-probabilities ----


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
        asked = _whole(settings, row, LOGPROBS).to(tl.int32)
        if asked >= 0:
            tiles = tl.arange(0, TILE_LANES)
            peak = _value(tl.max(tl.load(raw + s * TILES + tiles, mask=tiles < TILES, other=KEY_OUTSIDE)))
            x = logits + s.to(tl.int64) * stride
            own = _place(_key(tl.load(x + token)), token)
            total_N = tl.zeros((SUB,), tl.int64)
            ahead_N = tl.zeros((SUB,), tl.int32)
            for at in range(0, TILE, SUB):
                i = t * TILE + at + tl.arange(0, SUB)
                logit = tl.load(x + i, mask=i < vocab, other=float("-inf"))
                total_N += _weights(_centred(logit, peak))
                ahead_N += ((i < vocab) & (_place(_key(logit), i) > own)).to(tl.int32)
            tl.store(totals + s * TILES + t, tl.sum(total_N))
            tl.store(ahead + s * TILES + t, tl.sum(ahead_N))
            if asked > 0:
                i = t * TILE + tl.arange(0, TILE)
                key = _key(tl.load(x + i, mask=i < vocab, other=0.0))
                left = tl.where(i < vocab, _place(key, i), NO_PLACE)
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
        asked = _whole(settings, row, LOGPROBS).to(tl.int32)
        if asked >= 0:
            t = tl.arange(0, TILE_LANES)
            peak = _value(tl.max(tl.load(raw + s * TILES + t, mask=t < TILES, other=KEY_OUTSIDE)))
            log_total = _log_weight(tl.sum(tl.load(totals + s * TILES + t, mask=t < TILES, other=0)))
            own = tl.load(logits + s.to(tl.int64) * stride + token)
            tl.store(logprobs + s, (_centred(own, peak) - log_total).to(tl.float32))
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
                values = _centred(_value(_key_at(places)), peak) - log_total
                tl.store(best_ids + s.to(tl.int64) * best_stride + k, _id_at(places), mask=k < count)
                tl.store(best_logprobs + s.to(tl.int64) * best_stride + k, values.to(tl.float32), mask=k < count)


# ---- launches ----


def sample(
    logits: Tensor,
    rows_S: Tensor,
    known_S: Tensor,
    ids: Tensor,
    state: SamplerState,
    work: Workspace,
    tokens_S: Tensor,
    errors_S: Tensor,
    *,
    needs: Needs,
    masks: Tensor | None = None,
    mask_S: Tensor | None = None,
    logprobs: Logprobs | None = None,
) -> None:
    """One token for each slot; it is also written to the row's ids at its position, unless there is an error.

    logits: float32 [S, V], rows at any distance; not modified. rows_S: int32, the row of each slot, -1 for none.
    known_S: int32, the number of the row's known ids, which is the position of the token. ids: int32 [rows, any], of
    which a slot reads the known ones of its row. tokens_S, errors_S: int32, written: -1 with an error or without a row,
    and the code of the error (`device_state.error_text`). needs: at least what the rows need. masks: int32 words
    [any, words], bit i & 31 of word i >> 5 allows token i. mask_S: int32, the mask of each slot, -1 for none; read if
    `needs.processes`. logprobs: written for the slots that want them; required if `needs.logprobs`.
    """
    slots, vocab = logits.shape
    tiles, tile = work.tiles, work.tile
    lanes = triton.next_power_of_2(tiles)
    sub = tile if INTERPRETED else min(tile, 1024)
    grid, size = (tiles, slots), slots * vocab
    if not needs.processes:
        masks = None
    masking = (rows_S, 0, rows_S) if masks is None else (masks, masks.shape[1], mask_S)  # without masks none is read
    source = (
        *(logits, logits.stride(0), rows_S, state.params),
        *(work.x_SV, work.changed_S, work.raw_ST, work.best_ST),
    )
    launch(
        measure_tiles,
        grid,
        logits,
        logits.stride(0),
        rows_S,
        known_S,
        ids,
        ids.stride(0),
        state.params,
        state.lists,
        state.lists.stride(0),
        *masking,
        work.x_SV,
        work.counts_SV,
        work.changed_S,
        work.raw_ST,
        work.best_ST,
        work.low_ST,
        work.bin_counts_SB,
        work.bin_weights_SB,
        work.found_S,
        vocab,
        TILES=tiles,
        TILE=tile,
        SUB=sub,
        BINS=BINS,
        LANES=LIST_LANES,
        LISTS=needs.lists,
        PROCESS=needs.processes,
        MASKED=masks is not None,
        bytes=4 * size,
        num_warps=4,
    )
    if needs.lists:
        launch(
            count_bins,
            grid,
            *source,
            work.low_ST,
            work.bin_counts_SB,
            work.bin_weights_SB,
            vocab,
            TILES=tiles,
            TILE_LANES=lanes,
            TILE=tile,
            SUB=sub,
            BINS=BINS,
            bytes=4 * size,
            num_warps=4,
        )
        launch(
            list_tokens,
            grid,
            *source,
            work.low_ST,
            work.bin_counts_SB,
            work.bin_weights_SB,
            work.found_S,
            work.listed_SL,
            vocab,
            TILES=tiles,
            TILE_LANES=lanes,
            TILE=tile,
            SUB=sub,
            BINS=BINS,
            LISTED=LISTED,
            bytes=4 * size,
            num_warps=4,
        )
        launch(
            cut_list,
            (slots,),
            *source,
            work.low_ST,
            work.bin_counts_SB,
            work.bin_weights_SB,
            work.listed_SL,
            work.cuts_S,
            vocab,
            TILES=tiles,
            TILE_LANES=lanes,
            BINS=BINS,
            LISTED=LISTED,
            num_warps=16,
        )
    if needs.draws:
        launch(
            draw_tiles,
            grid,
            *source,
            known_S,
            work.cuts_S,
            work.scores_ST,
            work.drawn_ST,
            vocab,
            TILES=tiles,
            TILE_LANES=lanes,
            TILE=tile,
            SUB=sub,
            LISTS=needs.lists,
            bytes=4 * size,
            num_warps=4,
        )
    launch(
        finish,
        (slots,),
        rows_S,
        known_S,
        ids,
        ids.stride(0),
        state.params,
        work.raw_ST,
        work.best_ST,
        work.scores_ST,
        work.drawn_ST,
        tokens_S,
        errors_S,
        TILES=tiles,
        TILE_LANES=lanes,
        DRAW=needs.draws,
        num_warps=1,
    )
    if needs.logprobs:
        assert logprobs is not None, "a slot wants log-probabilities, and there is no room for them"
        raw = (logits, logits.stride(0), rows_S, state.params, work.raw_ST, tokens_S)
        tiled = (work.totals_ST, work.ahead_ST, work.bests_STK)
        launch(
            describe_tiles,
            grid,
            *raw,
            *tiled,
            vocab,
            layout.MAX_BEST,
            TILES=tiles,
            TILE_LANES=lanes,
            TILE=tile,
            SUB=sub,
            bytes=4 * size,
            num_warps=8,
        )
        launch(
            describe,
            (slots,),
            *raw,
            *tiled,
            logprobs.logprobs_S,
            logprobs.ranks_S,
            logprobs.best_ids_SK,
            logprobs.best_logprobs_SK,
            vocab,
            layout.MAX_BEST,
            TILES=tiles,
            TILE_LANES=lanes,
            BEST_LANES=triton.next_power_of_2(layout.MAX_BEST),
            num_warps=4,
        )
