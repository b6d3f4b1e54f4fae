"""The Gumbel-max draw: one token with probability proportional to e^z, with no sequential random state.

The argmin of log(e) - z over independent e ~ Exp(1) is distributed as softmax(z) (Gumbel, 1954; Maddison et al., NIPS
2014). e = -log(1 - u) with u = (word + 1/2) / 2^32: in float64 both u and 1 - u are exact and e lies in [2^-33, 22.9],
so every score is finite. (In float32 the largest u would round to 1.)

Letters: R rows, V vocabulary, B = V/4 blocks of four tokens, N any number of candidates over all rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvasir.sampling.numerics import EXPONENT_BIAS, MANTISSA_BITS, log
from kvasir.sampling.philox import block_words, split_seed, token_words

LEAST_LOG_E = -33 * math.log(2)  # e >= u >= 2^-33
SLACK = 1e-9  # far above the rounding of a score, so that screening never drops a winner
NO_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Noise:
    """The coordinates of each row's noise: words of the key and the position, [R] int64."""

    low_R: Tensor
    high_R: Tensor
    position_R: Tensor

    @classmethod
    def of(cls, seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> Noise:
        """The coordinates for one seed and one position per row."""
        columns = [(*split_seed(seed), position) for seed, position in zip(seeds, positions, strict=True)]
        return cls(*torch.tensor(columns, dtype=torch.int64).T.contiguous().to(device))

    def of_tokens(self, rows_N: Tensor, ids_N: Tensor) -> Tensor:
        """[N] words of the given tokens of the given rows."""
        return token_words((self.low_R[rows_N], self.high_R[rows_N]), self.position_R[rows_N], ids_N)

    def of_blocks(self, rows_N: Tensor, blocks_N: Tensor) -> Tensor:
        """[N, 4] words of the given blocks of the given rows."""
        return block_words((self.low_R[rows_N], self.high_R[rows_N]), self.position_R[rows_N], blocks_N)


def log_exponential(words: Tensor) -> Tensor:
    """log(e) for each word, float64, where e is the standard exponential of u = (word + 1/2) / 2^32."""
    one_minus_u = ((2.0**32 - 0.5) - words.double()).mul_(2.0**-32)
    return log(log(one_minus_u).neg_())


def lower_bound(words: Tensor) -> Tensor:
    """A float64 lower bound of log(e) for each word, at a tenth of the cost; for small e it is at most a tenth too low.

    e > u, and log2(u) lies above the piecewise linear function given by the bits of u (Mitchell, 1962).
    """
    bits = ((words.double() + 0.5) * 2.0**-32).view(torch.int64)
    return bits.double().mul_(2.0**-MANTISSA_BITS).sub_(EXPONENT_BIAS).mul_(math.log(2)).sub_(SLACK)


def least(rows_N: Tensor, ids_N: Tensor, scores_N: Tensor, num_rows: int) -> Tensor:
    """[R] the id with the lowest score in each row, ties to the lowest id; NO_ID for a row without candidates."""
    best_R = scores_N.new_full((num_rows,), math.inf).scatter_reduce_(0, rows_N, scores_N, "amin")
    ids_N = torch.where(scores_N == best_R[rows_N], ids_N, NO_ID)
    return ids_N.new_full((num_rows,), NO_ID).scatter_reduce_(0, rows_N, ids_N, "amin")


def draw_listed(ids_RK: Tensor, z_RK: Tensor, noise: Noise) -> Tensor:
    """[R] one of the listed tokens of each row. z_RK: float64, -inf for dropped tokens."""
    rows_N, places_N = torch.nonzero(z_RK > -math.inf, as_tuple=True)
    ids_N = ids_RK[rows_N, places_N]
    scores_N = log_exponential(noise.of_tokens(rows_N, ids_N)).sub_(z_RK[rows_N, places_N])
    return least(rows_N, ids_N, scores_N, len(ids_RK))


def draw(z_RV: Tensor, top_R: Tensor, noise: Noise) -> Tensor:
    """[R] one token of each row; the same that `draw_listed` returns for all V ids, but faster.

    z_RV: float64, at most 0, -inf for dropped tokens. top_R: for each row an id with z = 0. Its score is an upper bound
    of the winner's; tokens that cannot reach it are skipped, first by z alone (log(e) is never below LEAST_LOG_E), then
    by a lower bound of their score.
    """
    num_rows = len(z_RV)
    bar_R = log_exponential(noise.of_tokens(torch.arange(num_rows, device=z_RV.device), top_R))
    z_RB4 = pad(z_RV, (0, -z_RV.shape[1] % 4), value=-math.inf).view(num_rows, -1, 4)
    within_RB = _max_of_four(z_RB4) >= (LEAST_LOG_E - SLACK - bar_R)[:, None]
    rows_N, blocks_N = torch.nonzero(within_RB, as_tuple=True)
    words_N4 = noise.of_blocks(rows_N, blocks_N)
    z_N4 = z_RB4.flatten(0, 1).index_select(0, rows_N * z_RB4.shape[1] + blocks_N)

    over_N4 = lower_bound(words_N4).sub_(z_N4).sub_(bar_R[rows_N, None])
    places, lanes = torch.nonzero(over_N4 <= 0, as_tuple=True)
    scores = log_exponential(words_N4[places, lanes]).sub_(z_N4[places, lanes])
    return least(rows_N[places], blocks_N[places] * 4 + lanes, scores, num_rows)


def _max_of_four(z_RB4: Tensor) -> Tensor:
    a, b, c, d = z_RB4.unbind(-1)
    return torch.maximum(torch.maximum(a, b), torch.maximum(c, d))
