"""All filters in sequence, for rows that use more than top-k, top-p and min-p. In llama.cpp's order, each applied to
the tokens that the previous ones left:

    top-n-sigma, top-k, typical-p, top-p, min-p, XTC, dynamic temperature, mirostat or else adaptive-p

- top-n-sigma (Tang et al., "Top-nσ: Not All Logits Are You Need", 2024): keeps logits of at least peak - n * sigma.
  sigma is the standard deviation of the finite logits. Independent of the temperature.
- typical-p (Meister et al., "Locally Typical Sampling", TACL 2023): keeps the tokens whose surprise is nearest to the
  entropy, as many as needed for their probability to reach p; on ties, the lower id.
- XTC ("exclude top choices", p-e-w, text-generation-webui #6335): with the given probability, of the tokens whose
  probability is at least the threshold, keeps only the last in order. A threshold above 1/2 never matches two tokens.
- dynamic temperature (kalomaze, llama.cpp #4972): temperature - range .. + range, by the entropy of the remaining
  tokens, as a fraction of its maximum, to the power of the exponent. Filters then see a temperature of 1.
- mirostat 2 (Basu et al., "Mirostat", ICLR 2021, algorithm 2): drops tokens of more than mu bits of surprise. mu, at
  first 2 tau, moves by eta towards a surprise of tau. It is the sampler's carry; it is not a function of the ids.
- adaptive-p (MrJackSpade and ddh0, llama.cpp #17927): removes nothing, but replaces logits by the nearness of the
  probability to an aim. The aim moves so that the mean probability of the drawn tokens, weighted by powers of the
  decay, stays at the target. The carry is the weighted sum of these probabilities and the sum of their weights.

With neutral parameters the bits are those of `filters`. Letters: V vocabulary, N remaining tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir.plan import SamplingSpec
from kvasir.sampling.carry import GREEDY_BELOW, carried, is_adaptive, packed
from kvasir.sampling.gumbel import Noise, draw_listed
from kvasir.sampling.numerics import LOG2_E, best_ids, centred, entropy, log, log_weight, mass_of, tree_sum, weights
from kvasir.sampling.philox import STREAM_XTC, split_seed, token_words

NONE_TO_EXCLUDE = 0.5  # two tokens cannot both be more probable
SHARPNESS, INVERSE_WIDTH = 10.0, 1.0 / 0.3  # of adaptive-p, as in llama.cpp
TINY = 1e-300  # replaces 0, which has no logarithm


def needs_chain(spec: SamplingSpec) -> bool:
    """Whether the row uses a filter that only the chain implements."""
    return (
        spec.top_n_sigma > 0.0
        or spec.typical_p < 1.0
        or (spec.xtc_probability > 0.0 and spec.xtc_threshold <= NONE_TO_EXCLUDE)
        or spec.dynatemp_range > 0.0
        or spec.mirostat != 0
        or is_adaptive(spec)
    )


@dataclass(frozen=True, slots=True)
class Left:
    """Tokens that may still be drawn, by ascending id. x_N: float32 logits. z_N: float64, their log-probabilities up to
    a constant, with a maximum of 0."""

    ids_N: Tensor
    x_N: Tensor
    z_N: Tensor

    def only(self, keep_N: Tensor) -> Left:
        """Keeps the tokens of a bool mask, of which at least one is set."""
        z_N = self.z_N[keep_N]
        return Left(self.ids_N[keep_N], self.x_N[keep_N], z_N - z_N.amax())

    def head(self, order_N: Tensor, count: int) -> Left:
        """Keeps the first `count` tokens in this order of indices."""
        keep_N = torch.zeros_like(order_N, dtype=torch.bool)
        keep_N[order_N[:count]] = True
        return self.only(keep_N)

    def nucleus(self, order_N: Tensor, p: float) -> Left:
        """Keeps the shortest head in this order whose probability reaches p, or all tokens."""
        weight_N = weights(self.z_N[order_N])
        sum_N = weight_N.cumsum(-1)
        return self.head(order_N, int((sum_N - weight_N < mass_of(sum_N[-1:], p)).sum()))


def choose(x_V: Tensor, peak_1: Tensor, spec: SamplingSpec, position: int, carry: bytes) -> tuple[int, bytes]:
    """(token, next carry) for one row of float32 logits. peak_1: their maximum. carry: as returned for the previous
    token."""
    state = carried(spec, carry)
    left = narrowed(x_V, peak_1, spec, position, state)
    preferred = adaptive_p(left, spec.adaptive_target, state) if is_adaptive(spec) else left
    noise = Noise.of([spec.seed], [position], x_V.device)
    token = int(draw_listed(preferred.ids_N[None], preferred.z_N[None], noise)[0])
    return token, packed(next_state(left, token, spec, state)) if state else carry


def next_state(left: Left, token: int, spec: SamplingSpec, state: tuple[float, ...]) -> tuple[float, ...]:
    """The state after `token`, one of the remaining tokens, was drawn."""
    if is_adaptive(spec):
        p = float(probabilities(left)[left.ids_N == token])
        return (p + spec.adaptive_decay * state[0], 1.0 + spec.adaptive_decay * state[1])
    return (next_mu(left, token, spec, state[0]),)


def narrowed(x_V: Tensor, peak_1: Tensor, spec: SamplingSpec, position: int, state: tuple[float, ...]) -> Left:
    """The tokens that all filters keep. state: as `carried` returns it."""
    left = top_n_sigma(x_V, peak_1, spec.top_n_sigma, 1.0 if spec.dynatemp_range > 0.0 else spec.temperature)
    if 0 < spec.top_k < len(left.ids_N):
        left = left.head(_order(left), spec.top_k)
    if spec.typical_p < 1.0:
        left = typical_p(left, spec.typical_p)
    if spec.top_p < 1.0:
        left = left.nucleus(_order(left), spec.top_p)
    if spec.min_p > 0.0:
        left = left.only(left.z_N >= log(_number(max(spec.min_p, TINY), x_V.device)))
    if xtc_acts(spec, position):
        left = xtc(left, spec.xtc_threshold)
    if spec.dynatemp_range > 0.0:
        left = dynamic_temperature(left, spec)
    return mirostat(left, state[0]) if spec.mirostat else left


def top_n_sigma(x_V: Tensor, peak_1: Tensor, n: float, temperature: float) -> Left:
    """All tokens above -inf; with n above 0, only those within n standard deviations of the peak."""
    distance_V = centred(x_V, peak_1)
    keep_V = x_V > -math.inf
    if n > 0.0:
        count = keep_V.sum().double()
        mean = tree_sum(distance_V.where(keep_V, 0.0)) / count
        variance = tree_sum((distance_V - mean).square_().where(keep_V, 0.0)) / count
        keep_V &= distance_V >= variance.sqrt() * -n
    ids_N = torch.nonzero(keep_V)[:, 0]
    return Left(ids_N, x_V[ids_N], distance_V[ids_N] * (1.0 / temperature))


def typical_p(left: Left, p: float) -> Left:
    """Keeps the tokens whose surprise is nearest to the entropy, until their probability reaches p."""
    log_total, expected = entropy(left.z_N)
    distance_N = (log_total - left.z_N - expected).abs()
    return left.nucleus(distance_N.sort(stable=True).indices, p)


def xtc_acts(spec: SamplingSpec, position: int) -> bool:
    """Whether XTC applies at this position, which depends only on the seed and the position."""
    if spec.xtc_probability <= 0.0 or spec.xtc_threshold > NONE_TO_EXCLUDE:
        return False
    low, high, at, token = torch.tensor([*split_seed(spec.seed), position, 0])
    u = (int(token_words((low, high), at, token, STREAM_XTC)) + 0.5) * 2.0**-32
    return u <= spec.xtc_probability


def xtc(left: Left, threshold: float) -> Left:
    """Drops the tokens of at least `threshold` probability except the last in order; none if fewer than two."""
    weight_N = weights(left.z_N)
    least = torch.ceil(weight_N.sum().double() * threshold).long()
    above_N = weight_N >= least
    if int(above_N.sum()) < 2:
        return left
    lowest = left.x_N.where(above_N, math.inf).amin()
    last = torch.nonzero(above_N & (left.x_N == lowest))[-1, 0]
    above_N[last] = False
    return left.only(~above_N)


def dynamic_temperature(left: Left, spec: SamplingSpec) -> Left:
    """Divides the logits by a temperature that grows with the entropy of the remaining tokens."""
    low = max(0.0, spec.temperature - spec.dynatemp_range)
    high = spec.temperature + spec.dynatemp_range
    num_left = len(left.ids_N)
    if num_left == 1:
        return left
    greatest = log(_number(float(num_left), left.z_N.device))
    share = (entropy(left.z_N)[1] / greatest).clamp(TINY, 1.0)
    power = weights(log(share) * spec.dynatemp_exponent).double() * 2.0**-40
    temperature = (power * (high - low) + low).clamp_min(GREEDY_BELOW)
    return Left(left.ids_N, left.x_N, left.z_N * (1.0 / temperature))


def mirostat(left: Left, mu: float) -> Left:
    """Drops tokens of more than mu bits of surprise; the best one always stays."""
    surprise_N = (log_weight(weights(left.z_N).sum()) - left.z_N) * LOG2_E
    keep_N = surprise_N <= mu
    keep_N[torch.nonzero(left.x_N == left.x_N.amax())[0, 0]] = True
    return left.only(keep_N)


def next_mu(left: Left, token: int, spec: SamplingSpec, mu: float) -> float:
    """mu after `token`, one of the remaining tokens, was drawn."""
    z = left.z_N[left.ids_N == token]
    surprise = float((log_weight(weights(left.z_N).sum()) - z) * LOG2_E)
    return mu - spec.mirostat_eta * (surprise - spec.mirostat_tau)


def probabilities(left: Left) -> Tensor:
    """The probabilities of the remaining tokens, float64 [N]."""
    weight_N = weights(left.z_N)
    return weight_N.double() / weight_N.sum().double()


def adaptive_p(left: Left, target: float, state: tuple[float, ...]) -> Left:
    """The same tokens with other logits. state: the weighted sum of probabilities, and the sum of weights."""
    aim = min(max(2.0 * target - state[0] / state[1], 0.0), 1.0)
    distance_N = ((probabilities(left) - aim) * INVERSE_WIDTH).abs()
    z_N = -(distance_N * SHARPNESS * distance_N / (distance_N + 1.0))
    return Left(left.ids_N, left.x_N, z_N - z_N.amax())


def _order(left: Left) -> Tensor:
    """Indices by descending logit, ties by ascending id."""
    return best_ids(left.x_N[None], len(left.x_N))[0]


def _number(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device=device)
