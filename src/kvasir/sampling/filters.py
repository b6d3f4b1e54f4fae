"""Temperature, then the filters top-k, top-p and min-p.

Each filter keeps a head of the same list, the tokens by descending logit, then ascending id; so together they keep the
shortest head.

- temperature: z = (logit - peak) / T.
- top-k (Fan et al., ACL 2018): the first k, never more.
- top-p (Holtzman et al., ICLR 2020): the shortest head whose probability, among the tokens that top-k kept, reaches p.
- min-p (Nguyen et al., ICLR 2025): tokens whose probability is at least min_p times the maximum.

This is the order of transformers and llama.cpp. vLLM applies min-p before top-k and top-p, which gives a smaller
nucleus if both are used: top-p then takes its share of the tokens that min-p kept. With only one of top-p and min-p
there is no difference.

Letters: R rows, V vocabulary, K listed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvasir.plan import SamplingSpec
from kvasir.sampling.numerics import best_ids, centred, log, mass_of, total_weight, weights

FIRST_LIST = 256  # initial length of the list if only top-p bounds it
LIST_GROWTH = 16
UNBOUNDED = 2**62


def needs_list(spec: SamplingSpec, vocab: int) -> bool:
    """Whether the tokens must be sorted."""
    return 0 < spec.top_k < vocab or spec.top_p < 1.0


def scaled(x: Tensor, peak: Tensor, specs: Sequence[SamplingSpec]) -> Tensor:
    """z of float32 logits x [R, any], float64, at most 0. peak: [R, 1]."""
    return centred(x, peak).mul_(_inverse_temperatures(specs, x))


def min_p_(z: Tensor, specs: Sequence[SamplingSpec]) -> Tensor:
    """Sets z [R, any] to -inf in place for tokens that min-p drops. Returns z."""
    if all(s.min_p <= 0.0 for s in specs):
        return z
    bound = log(_column([max(s.min_p, 1e-300) for s in specs], z))
    asked = _column([s.min_p for s in specs], z) > 0.0
    return z.masked_fill_(asked & (z < bound), -math.inf)


def listed(x_RV: Tensor, peak_R1: Tensor, specs: Sequence[SamplingSpec]) -> tuple[Tensor, Tensor]:
    """(ids_RK int64, z_RK float64): the tokens in order and their z, -inf for dropped tokens."""
    vocab = x_RV.shape[1]
    limits = [s.top_k if 0 < s.top_k < vocab else vocab for s in specs]
    whole = [i for i, limit in enumerate(limits) if limit == vocab]
    total_R1 = torch.zeros_like(peak_R1, dtype=torch.int64)  # 0 where top-k bounds the list, whose own total counts
    if whole:
        scale_R1 = _inverse_temperatures([specs[i] for i in whole], x_RV)
        total_R1[whole] = total_weight(x_RV[whole], peak_R1[whole], scale_R1)
    size = max(limit if limit < vocab else FIRST_LIST for limit in limits)
    return _listed(x_RV, peak_R1, specs, _column(limits, x_RV, torch.int64), total_R1, size)


def _listed(
    x_RV: Tensor,
    peak_R1: Tensor,
    specs: Sequence[SamplingSpec],
    limit_R1: Tensor,
    total_R1: Tensor,
    size: int,
) -> tuple[Tensor, Tensor]:
    """As `listed`, starting with K = size; rows whose nucleus does not end within the list are recomputed with a larger
    K."""
    size = min(size, x_RV.shape[1])
    ids_RK = best_ids(x_RV, size)
    z_RK = scaled(x_RV.gather(1, ids_RK), peak_R1, specs)
    z_RK.masked_fill_(torch.arange(size, device=x_RV.device) >= limit_R1, -math.inf)
    ended_R1 = _top_p_(z_RK, total_R1, specs) | (limit_R1 <= size)
    min_p_(z_RK, specs)
    open_ = [i for i, ended in enumerate(ended_R1[:, 0].tolist()) if not ended]
    if open_:
        some = [specs[i] for i in open_]
        longer = _listed(x_RV[open_], peak_R1[open_], some, limit_R1[open_], total_R1[open_], size * LIST_GROWTH)
        more = longer[0].shape[1] - size
        ids_RK, z_RK = pad(ids_RK, (0, more)), pad(z_RK, (0, more), value=-math.inf)
        ids_RK[open_], z_RK[open_] = longer
    return ids_RK, z_RK


def _top_p_(z_RK: Tensor, total_R1: Tensor, specs: Sequence[SamplingSpec]) -> Tensor:
    """Drops in place the tokens after the nucleus. Returns [R, 1] bool: whether the nucleus ends within the list.

    A token stays if the tokens before it have not yet reached the mass. A top_p of 1 drops nothing, not even tokens
    whose weight rounds to 0.
    """
    weight_RK = weights(z_RK)
    sum_RK = weight_RK.cumsum(-1)
    total_R1 = torch.where(total_R1 > 0, total_R1, sum_RK[:, -1:])
    top_p_R1 = _column([s.top_p for s in specs], z_RK)
    mass_R1 = torch.where(top_p_R1 < 1.0, mass_of(total_R1, top_p_R1), UNBOUNDED)
    z_RK.masked_fill_(sum_RK - weight_RK >= mass_R1, -math.inf)
    return sum_RK[:, -1:] >= mass_R1


def _inverse_temperatures(specs: Sequence[SamplingSpec], like: Tensor) -> Tensor:
    return _column([1.0 / s.temperature for s in specs], like)


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """[R, 1] on the device of `like`."""
    return torch.tensor(values, dtype=dtype, device=like.device).unsqueeze(1)
