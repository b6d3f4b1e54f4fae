"""The torch bodies of the gated delta rule."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kvasir.ops.activation import sigmoid
from kvasir.ops.gated_delta import Heads
from kvasir.ops.gated_delta.plan import Stage, StatePlan, WalkGroup
from kvasir.ops.norm.body import tree_sum

# letters: T token rows, C channels of q, k and v, I numbers of an input row, K taps of the convolution, H heads of q
# and k, V heads of v, r = V / H, d their width of q and k, e of v, n walks, m of them at a place, p places
_NORM_EPS = 1e-6  # as in the published model


def delta_gates(
    beta_TV: Tensor, dt_TG: Tensor, log_rate_G: Tensor, bias_G: Tensor, strength: float = 1.0
) -> tuple[Tensor, Tensor]:
    x_TG = dt_TG + bias_G
    softplus_TG = torch.where(x_TG > 20.0, x_TG, torch.log1p(torch.exp(x_TG)))
    return sigmoid(beta_TV) * strength, torch.exp(-torch.exp(log_rate_G) * softplus_TG)


def delta_inputs(q: Tensor, k: Tensor, v: Tensor, beta_TV: Tensor, decay_TG: Tensor) -> Tensor:
    return torch.cat([q, k, v, beta_TV, decay_TG], dim=1)


def gated_delta(
    x_TI: Tensor,
    kernel_CK: Tensor,
    state: Tensor,
    rows: Tensor,
    plan: StatePlan,
    heads: Heads,
    act: Callable[[Tensor], Tensor],
) -> Tensor:
    before = kernel_CK.shape[1] - 1
    rows[plan.slots // plan.block_size, plan.slots % plan.block_size + before] = x_TI
    out_TVe = torch.zeros(x_TI.shape[0], heads.v, heads.v_dim, device=x_TI.device)
    for group in plan.groups:
        _walk(group, kernel_CK, state, rows, out_TVe, heads, act)
    return out_TVe


def _walk(
    group: WalkGroup, kernel_CK: Tensor, state: Tensor, rows: Tensor, out_TVe: Tensor, heads: Heads, act: Callable
) -> None:
    before = kernel_CK.shape[1] - 1
    blocks_n = group.stages[0].blocks
    state_nVed, tail_nKI = state[blocks_n], rows[blocks_n, :before]
    state_nVed[group.fresh] = 0.0
    tail_nKI[group.fresh] = 0.0
    for stage in group.stages:
        new = stage.blocks[stage.opened]
        state[new] = state_nVed[stage.opened]
        rows[new, :before] = tail_nKI[stage.opened]
        x_npI = rows[stage.blocks, : before + len(stage.counts)]
        state_nVed = state_nVed[: len(stage.blocks)]
        out_npVe = _through(stage, _convolved(x_npI, kernel_CK, act), x_npI[:, before:], state_nVed, heads)
        out_TVe[stage.targets] = out_npVe.flatten(0, 1)[stage.results]
        tail_nKI = x_npI[:, len(stage.counts) :]


def _convolved(x_npI: Tensor, kernel_CK: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    """[n, p, C], from rows that begin K - 1 tokens earlier; taps are added in ascending order."""
    channels, taps = kernel_CK.shape
    places = x_npI.shape[1] - taps + 1
    total_npC = x_npI[:, :places, :channels] * kernel_CK[:, 0]
    for tap in range(1, taps):
        total_npC = total_npC + x_npI[:, tap : tap + places, :channels] * kernel_CK[:, tap]
    return act(total_npC)


def _through(stage: Stage, qkv_npC: Tensor, x_npI: Tensor, state_nVed: Tensor, h: Heads) -> Tensor:
    """Advances the states, in place, to the end of the stage. Returns the results [n, p, V, e]; entries before the
    first wanted place, and at places that a walk does not have, are undefined."""
    wide = h.qk * h.dim
    q_npHd = _unit(qkv_npC[..., :wide].unflatten(-1, (h.qk, h.dim))) * (1.0 / math.sqrt(h.dim))
    k_npHd = _unit(qkv_npC[..., wide : 2 * wide].unflatten(-1, (h.qk, h.dim)))
    heads = h.qk
    if h.tiled:  # as if no heads shared a q and a k
        heads = h.v
        q_npHd, k_npHd = (x.repeat(1, 1, h.v // h.qk, 1) for x in (q_npHd, k_npHd))
    v_npHre1 = qkv_npC[..., 2 * wide :].unflatten(-1, (heads, -1, h.v_dim, 1))
    beta_npHr11 = x_npI[..., h.channels : h.channels + h.v].unflatten(-1, (heads, -1, 1, 1))
    decay_npHr1g = x_npI[..., h.channels + h.v :].unflatten(-1, (heads, -1, 1, h.decays))
    state_nHred = state_nVed.unflatten(1, (heads, -1))
    out_npHre = torch.empty_like(v_npHre1[..., 0])
    for place, count in enumerate(stage.counts):
        at = (slice(count), place)
        k_mH11d, state_mHred = k_npHd[at][:, :, None, None], state_nHred[:count]
        state_mHred *= decay_npHr1g[at]
        predicted_mHre1 = tree_sum(state_mHred * k_mH11d)
        state_mHred += (v_npHre1[at] - predicted_mHre1) * beta_npHr11[at] * k_mH11d
        if place >= stage.first:
            out_npHre[at] = tree_sum(state_mHred * q_npHd[at][:, :, None, None])[..., 0]
    return out_npHre.flatten(2, 3)


def _unit(x: Tensor) -> Tensor:
    """Normalises the vectors of the last dimension to length 1."""
    return x * (1.0 / torch.sqrt(tree_sum(x * x) + _NORM_EPS))
