"""Philox4x32-10: counter-based random words (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).

A word is a pure function of key and counter, so there is no sequential state: a token's noise depends only on the seed,
the position and the token's id.

    key      = the 64 bits of the seed: (low word, high word)
    counter  = (position, token id >> 2, stream, 0)
    word     = number (token id & 3) of the four results

Words are stored as int64, each in [0, 2^32), because torch has 64-bit integer arithmetic on every device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROUNDS = 10
MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # the key's increments: golden ratio and sqrt(3) - 1

STREAM_TOKEN = 0  # the noise for drawing the token; other random choices use other streams
STREAM_XTC = 1  # whether XTC applies at this position: the word of token 0


def _multiply(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of constant * x.

    The 64-bit product does not fit in a signed int64. Both constants lie within 2^30 of 2^32, so (constant - 2^32) * x
    fits. It is short by exactly x * 2^32: by x in the high word, by nothing in the low word.
    """
    product = x * (constant - (1 << 32))
    return (product >> 32).add_(x), product.bitwise_and_(MASK)


def philox4x32(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words for each counter. counter: four, key: two int64 tensors of words, broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + WEYL[0]) & MASK
        k1 = (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def split_seed(seed: int) -> tuple[int, int]:
    """The key's two words, low first. Seeds are taken modulo 2^64: -1 and 2^64 - 1 are the same seed."""
    return seed & MASK, (seed >> 32) & MASK


def block_words(key: Sequence[Tensor], position: Tensor, block: Tensor, stream: int = STREAM_TOKEN) -> Tensor:
    """The words of tokens 4 * block to 4 * block + 3, [..., 4] int64. All arguments [...] int64."""
    zero = torch.zeros_like(block)
    return torch.stack(philox4x32((position, block, zero + stream, zero), key), dim=-1)


def token_words(key: Sequence[Tensor], position: Tensor, token: Tensor, stream: int = STREAM_TOKEN) -> Tensor:
    """The word of each token, [...] int64. All arguments [...] int64."""
    words = block_words(key, position, token >> 2, stream)
    return words.gather(-1, (token & 3).unsqueeze(-1)).squeeze(-1)
