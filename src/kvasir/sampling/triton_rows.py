"""What the sampler's kernels read of a row: its settings (`device_layout.Column`) and what earlier launches found."""

from __future__ import annotations

import triton
import triton.language as tl

from kvasir.sampling import device_layout as layout
from kvasir.sampling.device_layout import Column
from kvasir.sampling.triton_numerics import KEY_HIGH, KEY_LOW, KEY_OUTSIDE, NO_PLACE

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


@triton.jit
def whole(settings, row, COLUMN: tl.constexpr):
    return tl.load(settings + row * WIDTH + COLUMN)


@triton.jit
def real(settings, row, COLUMN: tl.constexpr):
    return tl.load(settings + row * WIDTH + COLUMN).to(tl.float64, bitcast=True)


@triton.jit
def peaks(raw, best, s, TILES: tl.constexpr, LANES: tl.constexpr):
    """The key of the greatest raw logit, and the place of the best processed one."""
    t = tl.arange(0, LANES)
    raw_key = tl.max(tl.load(raw + s * TILES + t, mask=t < TILES, other=KEY_OUTSIDE))
    place = tl.max(tl.load(best + s * TILES + t, mask=t < TILES, other=NO_PLACE))
    return raw_key, place


@triton.jit
def is_sound(key):
    return (key > KEY_LOW) & (key <= KEY_HIGH)


@triton.jit
def has_list(settings, row):
    """Whether top-k or top-p ends the row's list of tokens."""
    some = (whole(settings, row, LIMIT) > 0) | (real(settings, row, TOP_P) < 1.0)
    return (whole(settings, row, DRAWS) != 0) & some


@triton.jit
def logits_of(logits, stride, x_room, changed, s, vocab):
    """Pointer to a slot's processed logits."""
    base = logits + s.to(tl.int64) * stride
    if tl.load(changed + s) != 0:
        base = x_room + s.to(tl.int64) * vocab
    return base
