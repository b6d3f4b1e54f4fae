"""Walks through a grammar before it is taken: some tokens deep in several directions, and along the ways to its ends.

They follow it as answers do, under the same limits, so that what would fail an answer there refuses the grammar.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from kvasir.guided.grammar import Grammar, Guide

DEPTH = 24  # tokens that are chosen in a walk; those that are forced come besides
SECONDS = 1.0  # of processor time, after which no further token is chosen
LONGEST = 2000  # tokens that are tried for the longest
_ENDS = (b'"', b"}", b"]", b'"}', b'"]', b"\n", b".")

Choice = Callable[[int], int]  # of a mask's bits, of which one at least is set


class Explorer:
    """Of one vocabulary."""

    def __init__(self, tokens: Sequence[bytes], eos_ids: Sequence[int]):
        self._eos = sum(1 << i for i in set(eos_ids))
        first: dict[bytes, int] = {}
        for i, data in enumerate(tokens):
            first.setdefault(data, i)
        self._ends = [first[text] for text in _ENDS if text in first]
        lengths = sorted(range(len(tokens)), key=lambda i: (len(tokens[i]), i))
        self._short = [i for i in lengths if tokens[i]][:LONGEST]
        self._long = lengths[: -LONGEST - 1 : -1]

    def walk(self, grammar: Grammar) -> None:
        """Raises GuideError."""
        until = time.process_time() + SECONDS
        rng = random.Random(0)
        ways: list[Choice] = [
            lambda mask: _first(mask, (*self._ends, *self._short)),
            lambda mask: _first(mask, self._long),
            *[lambda mask: _some(mask, rng)] * 2,
        ]
        for i, way in enumerate(ways):
            self._go(grammar.begin(), way, until, ends=i == 0)

    def _go(self, guide: Guide, way: Choice, until: float, ends: bool) -> None:
        """ends: as soon as the grammar lets it."""
        chosen = 0
        while not guide.done and chosen < DEPTH and time.process_time() < until:
            if forced := guide.forced():
                guide.advance(forced)
                continue
            mask = int.from_bytes(guide.allowed(), "little")
            goes_on = mask & ~self._eos
            if not goes_on or (ends and goes_on != mask):
                return
            guide.advance([way(goes_on)])
            chosen += 1


def _first(mask: int, ids: Sequence[int]) -> int:
    """The first of the ids that is allowed, else the lowest that is."""
    bits = mask.to_bytes(mask.bit_length() // 8 + 1, "little")
    size = 8 * len(bits)
    return next((i for i in ids if i < size and bits[i >> 3] >> (i & 7) & 1), (mask & -mask).bit_length() - 1)


def _some(mask: int, rng: random.Random) -> int:
    """A token chosen at random: the first one after a random place, else the lowest."""
    rest = mask >> (start := rng.randrange(mask.bit_length()))
    return start + (rest & -rest).bit_length() - 1
