"""Tries out a grammar before it is accepted: follows it many tokens deep in several directions, and on short paths to
its end. The guides and limits are those of real sequences, so a failure here refuses the grammar.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from kvasir.guided.grammar import CompiledGrammar, GrammarGuide

DEPTH = 24  # chosen tokens in a walk; forced tokens are not counted
SECONDS = 1.0  # of CPU time, after which no further token is chosen
LONGEST = 2000  # of the shortest and of the longest tokens are tried
_ENDS = (b'"', b"}", b"]", b'"}', b'"]', b"\n", b".")

Choice = Callable[[int], int]  # from a mask, of which at least one bit is set, to an allowed id


class Explorer:
    """Walks through grammars over one vocabulary."""

    def __init__(self, tokens: Sequence[bytes], eos_ids: Sequence[int]):
        self._eos = sum(1 << i for i in set(eos_ids))
        first: dict[bytes, int] = {}
        for i, data in enumerate(tokens):
            first.setdefault(data, i)
        self._ends = [first[text] for text in _ENDS if text in first]
        lengths = sorted(range(len(tokens)), key=lambda i: (len(tokens[i]), i))
        self._short = [i for i in lengths if tokens[i]][:LONGEST]
        self._long = lengths[: -LONGEST - 1 : -1]

    def walk(self, grammar: CompiledGrammar) -> None:
        """Raises GuideError if the grammar fails."""
        until = time.process_time() + SECONDS
        rng = random.Random(0)
        ways: list[Choice] = [
            lambda mask: _first(mask, (*self._ends, *self._short)),
            lambda mask: _first(mask, self._long),
            *[lambda mask: _some(mask, rng)] * 2,
        ]
        for i, way in enumerate(ways):
            self._go(grammar.begin(), way, until, ends=i == 0)

    def _go(self, guide: GrammarGuide, way: Choice, until: float, ends: bool) -> None:
        """ends: stop as soon as the grammar may end."""
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
    """The first of the ids that is allowed, else the lowest allowed id."""
    bits = mask.to_bytes(mask.bit_length() // 8 + 1, "little")
    size = 8 * len(bits)
    return next((i for i in ids if i < size and bits[i >> 3] >> (i & 7) & 1), (mask & -mask).bit_length() - 1)


def _some(mask: int, rng: random.Random) -> int:
    """A random allowed id: the first one from a random position on."""
    rest = mask >> (start := rng.randrange(mask.bit_length()))
    return start + (rest & -rest).bit_length() - 1
