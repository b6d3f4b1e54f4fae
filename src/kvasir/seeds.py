"""Seeds: draws one for a request that has none, and derives the seed of each choice as a pure function."""

from __future__ import annotations

import secrets

DRAWN = 1 << 53  # drawn seeds are below it, and so stay exact in clients that read JSON numbers as doubles
_MASK = (1 << 64) - 1


def draw_seed() -> int:
    """A new seed from the operating system."""
    return secrets.randbelow(DRAWN)


def answer_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request: splitmix64 (Steele et al., OOPSLA 2014) over seed and index."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
