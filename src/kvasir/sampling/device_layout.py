"""What the sampler's kernels and their host side agree on: a row's parameters as numbers, and sizes.

A row's parameters are int64 words: integers, or the bits of a float64. Its lists are int32 words, one list after the
other: stop ids, bias ids, biases (bits of a float32), ends of bad words, ids of bad words.
"""

from __future__ import annotations

from enum import IntEnum

WIDTH = 32  # words of a row's parameters


class Column(IntEnum):
    """The place of each parameter. REAL: those that are bits of a float64."""

    DRAWS = 0  # 0: greedy
    LIMIT = 1  # of top-k; 0: none
    TOP_P = 2
    LEAST_Z = 3  # of min-p: tokens below it are dropped
    INVERSE_TEMPERATURE = 4
    SEED_LOW = 5
    SEED_HIGH = 6
    PROMPT_LEN = 7
    LOGPROBS = 8  # -1: none
    MIN_TOKENS = 9
    STOPS = 10  # lengths of lists
    BIASES = 11  # -1: one lies outside the vocabulary
    WORDS = 12
    LONGEST = 13  # ids of the longest bad word
    BIASES_AT = 14  # where the lists begin; stop ids at 0
    WORD_ENDS_AT = 15
    WORD_IDS_AT = 16
    REPETITION = 17
    REPETITION_LAST_N = 18
    FREQUENCY = 19
    PRESENCE = 20
    OCCURRENCE_LAST_N = 21


REAL = (
    *(Column.TOP_P, Column.LEAST_Z, Column.INVERSE_TEMPERATURE),
    *(Column.REPETITION, Column.FREQUENCY, Column.PRESENCE),
)

TILE = 4096  # tokens of a program
BINS = 2048  # of logits, in which the end of a list is searched
LISTED = 4096  # tokens of the bins around the end that are listed; more are read from the logits
MAX_BEST = 128  # log-probabilities besides the token's own

KEY_LOW, KEY_NAN = -0x7F800001, 0x7FFFFFFF  # of -inf and of NaN, among int32 keys in the order of float32 values

OK, NOT_A_NUMBER, ALL_LOW, NOTHING_LEFT, BIAS_OUTSIDE = range(5)
