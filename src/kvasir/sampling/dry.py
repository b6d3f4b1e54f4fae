"""DRY, "don't repeat yourself" (p-e-w, text-generation-webui #5677), as llama.cpp has it (its `llama_sampler_dry`).

Where the ids end with n tokens that stood before, the token which followed them there would go on with the repetition.
Its logit loses multiplier * base ^ (n - allowed_length) for the greatest such n, if that is at least allowed_length:

    ids  a b c c b c y a b c        the last three, `a b c`, stood at the start: n of the `c` after them is 3
               |   |                `c` stands before `b`: 1, `b c` before `y`: 2

Looked at are the last `penalty_last_n` ids, prompt included (-1: all). No repetition goes across a sequence breaker,
and an id that is one by itself is never punished.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvasir.plan import SamplingSpec

GREATEST = float(np.finfo(np.float32).max)


def is_on(spec: SamplingSpec) -> bool:
    return spec.dry_multiplier != 0.0 and spec.dry_penalty_last_n != 0


def penalties(ids: np.ndarray, spec: SamplingSpec) -> dict[int, float]:
    """By token, what its logit loses: float32 numbers. ids: int32, all known ones."""
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
    """For each place, how many tokens up to it equal the last ones of all; the last place has all of them.

    The Z-algorithm (Gusfield, 1997) from the end to the start: each token is compared with success once, so that the
    whole is linear. A box is a run [low, high) of distances from the end that is known to equal the first ones.
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
    """[n] bool: which of the ids break repetitions by themselves."""
    words = np.frombuffer(mask, "<i4")
    known = (window >= 0) & (window >> 5 < len(words))
    found = np.zeros(len(window), bool)
    found[known] = words[window[known] >> 5] >> (window[known] & 31) & 1
    return found


def _unbroken(window: np.ndarray, breakers: np.ndarray, sequences: tuple[tuple[int, ...], ...]) -> int:
    """How many ids stand after the last breaker: the one that begins last, of these the longest."""
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
    """Never infinite: what is punished stays possible."""
    return float(np.float32(min(spec.dry_multiplier * _power(spec.dry_base, exponent), GREATEST)))


def _power(base: float, exponent: int) -> float:
    """By squaring, so that the bits are of multiplications alone."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
