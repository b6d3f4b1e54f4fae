"""DRY, "don't repeat yourself" (p-e-w, text-generation-webui #5677), as in llama.cpp (`llama_sampler_dry`).

If the last n ids occurred earlier, the token that followed them there would continue the repetition. Its logit is
reduced by multiplier * base ^ (n - allowed_length), for the largest such n, if n is at least allowed_length:

    ids  a b c c b c y a b c        the last three, `a b c`, are also at the start: n of the `c` after them is 3
               |   |                `c` is before `b`: 1, `b c` before `y`: 2

Only the last `penalty_last_n` ids count, prompt included (-1: all). A repetition does not extend across a sequence
breaker, and an id that is a breaker by itself is never penalised.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvasir.plan import SamplingSpec

GREATEST = float(np.finfo(np.float32).max)


def is_on(spec: SamplingSpec) -> bool:
    """Whether DRY can penalise a token of the row."""
    return spec.dry_multiplier != 0.0 and spec.dry_penalty_last_n != 0


def penalties(ids: np.ndarray, spec: SamplingSpec) -> dict[int, float]:
    """Token -> amount to subtract from its logit, as float32 values. ids: int32, all known ids."""
    window = ids[-spec.dry_penalty_last_n :] if spec.dry_penalty_last_n > 0 else ids
    breakers = _breakers(window, spec.dry_breakers)
    limit = _unbroken(window, breakers, spec.dry_breaker_sequences)
    if limit < spec.dry_allowed_length:
        return {}
    longest: dict[int, int] = {}
    tokens = window.tolist()
    for place, repeated in enumerate(suffix_repeats(tokens)[:-1]):
        if repeated >= spec.dry_allowed_length and not breakers[place + 1]:
            token = tokens[place + 1]
            longest[token] = max(longest.get(token, 0), min(repeated, limit))
    return {token: _penalty(n - spec.dry_allowed_length, spec) for token, n in longest.items()}


def suffix_repeats(tokens: Sequence[int]) -> list[int]:
    """For each index, how many tokens up to it equal the last tokens of the list; for the last index, the whole length.

    The Z-algorithm (Gusfield, 1997) from the end to the start: each token is compared successfully only once, so the
    time is linear. A box is a range [low, high) of distances from the end that is known to equal the first distances.
    """
    last = len(tokens) - 1
    by_distance = [0] * len(tokens)
    low = high = 0
    for k in range(1, len(tokens)):
        n = min(by_distance[k - low], high - k) if k < high else 0
        if k + n >= high:
            while k + n <= last and tokens[last - n] == tokens[last - k - n]:
                n += 1
            low, high = k, k + n
        by_distance[k] = n
    if tokens:
        by_distance[0] = len(tokens)
    return by_distance[::-1]


def _breakers(window: np.ndarray, mask: bytes | memoryview) -> np.ndarray:
    """[n] bool: which ids are breakers by themselves."""
    words = np.frombuffer(mask, "<i4")
    known = (window >= 0) & (window >> 5 < len(words))
    found = np.zeros(len(window), bool)
    found[known] = words[window[known] >> 5] >> (window[known] & 31) & 1
    return found


def _unbroken(window: np.ndarray, breakers: np.ndarray, sequences: tuple[tuple[int, ...], ...]) -> int:
    """How many ids follow the last breaker: the one that begins last, and the longest of those."""
    places = np.flatnonzero(breakers)
    found = (int(places[-1]), 1) if len(places) else (-1, 1)
    for sequence in sequences:
        heads = np.flatnonzero(window[: len(window) - len(sequence) + 1] == sequence[0]) if sequence else ()
        for head in heads[::-1]:
            if head < found[0]:
                break
            if np.array_equal(window[head : head + len(sequence)], sequence):
                found = max(found, (int(head), len(sequence)))
                break
    return len(window) - sum(found)


def _penalty(exponent: int, spec: SamplingSpec) -> float:
    """Capped to a finite value, so that a penalised token stays possible."""
    return float(np.float32(min(spec.dry_multiplier * _power(spec.dry_base, exponent), GREATEST)))


def _power(base: float, exponent: int) -> float:
    """By squaring, so that only multiplications determine the bits."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
