"""The torch bodies of RWKV-7."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvasir.ops.activation.body import sigmoid
from kvasir.ops.gated_delta.plan import Stage, StatePlan
from kvasir.ops.norm.body import layer_norm, tree_sum
from kvasir.ops.wkv import WkvSizes, WkvWeights

# letters: T token rows, D channels of the shift, M mixes, C channels of all heads, H heads, d their width of keys, e of
# values (the same number), I numbers of an input row, n walks, m of them at a place, p places
_LEAST_LENGTH = 1e-12  # that a removed key is divided by
_DECAY = -math.exp(-0.5)


def token_shift(x_TD: Tensor, mix_MD: Tensor, rows: Tensor, plan: StatePlan) -> tuple[Tensor, ...] | Tensor:
    width = x_TD.shape[1]
    rows[plan.slots // plan.block_size, plan.slots % plan.block_size + 1, :width] = x_TD
    last_TD = torch.zeros_like(x_TD)
    for group in plan.groups:
        before_nD = rows[group.stages[0].blocks, 0, :width]
        before_nD[group.fresh] = 0.0
        for stage in group.stages:
            rows[stage.blocks[stage.opened], 0, :width] = before_nD[stage.opened]
            x_npD = rows[stage.blocks, : 1 + len(stage.counts), :width]
            last_TD[stage.targets] = x_npD[:, :-1].flatten(0, 1)[stage.results]
            before_nD = x_npD[:, -1]
    change_TD = last_TD - x_TD
    mixed = [x_TD + change_TD * mix_D for mix_D in mix_MD]
    return tuple(mixed) if len(mixed) > 1 else mixed[0]


def wkv(
    r_TC: Tensor,
    w_TC: Tensor,
    k_TC: Tensor,
    v_TC: Tensor,
    a_TC: Tensor,
    weights: WkvWeights,
    state: Tensor,
    rows: Tensor,
    plan: StatePlan,
    sizes: WkvSizes,
) -> Tensor:
    inputs_TI = torch.cat([w_TC, k_TC, v_TC, a_TC], dim=1)
    first = rows.shape[2] - inputs_TI.shape[1]
    rows[plan.slots // plan.block_size, plan.slots % plan.block_size + 1, first:] = inputs_TI
    r_THd = r_TC.unflatten(1, (sizes.heads, sizes.dim))
    out_THe = torch.zeros_like(r_THd)
    for group in plan.groups:
        state_nHed = state[group.stages[0].blocks]
        state_nHed[group.fresh] = 0.0
        for stage in group.stages:
            state[stage.blocks[stage.opened]] = state_nHed[stage.opened]
            state_nHed = state_nHed[: len(stage.blocks)]
            x_npI = rows[stage.blocks, 1 : 1 + len(stage.counts), first:]
            found_npHe = _through(stage, x_npI, _at_places(r_THd, stage), state_nHed, weights, sizes)
            out_THe[stage.targets] = found_npHe.flatten(0, 1)[stage.results]
    k_THd, v_THe = _key(k_TC, a_TC, weights).view_as(r_THd), v_TC.view_as(r_THd)
    bonus_TH1 = tree_sum(r_THd * k_THd * weights.r_k.view(sizes.heads, -1))
    if sizes.eps is not None:
        assert weights.weight is not None and weights.bias is not None
        scale_He, shift_He = (x.view(sizes.heads, -1) for x in (weights.weight, weights.bias))
        out_THe = layer_norm(out_THe, scale_He, shift_He, sizes.eps)
    return (out_THe + bonus_TH1 * v_THe).flatten(1)


def _key(k: Tensor, a: Tensor, weights: WkvWeights) -> Tensor:
    """[..., C]: what is written."""
    return k + k * (sigmoid(a) - 1.0) * weights.k_a


def _at_places(x_THd: Tensor, stage: Stage) -> Tensor:
    """The step's rows at the stage's places, [n, p, H, d]; zeros at the others."""
    found = torch.zeros(len(stage.blocks) * len(stage.counts), *x_THd.shape[1:], device=x_THd.device)
    found[stage.results] = x_THd[stage.targets]
    return found.unflatten(0, (len(stage.blocks), len(stage.counts)))


def _through(
    stage: Stage, x_npI: Tensor, r_npHd: Tensor, state_nHed: Tensor, weights: WkvWeights, sizes: WkvSizes
) -> Tensor:
    """Advances the states, in place, to the end of the stage. Returns o [n, p, H, e]; entries before the first wanted
    place, and at places that a walk does not have, are undefined."""
    w_npC, own_npC, v_npC, a_npC = x_npI.chunk(4, -1)

    def by_head(x_npC: Tensor) -> Tensor:
        return x_npC.unflatten(-1, (sizes.heads, sizes.dim))

    decay_npHd, rate_npHd = torch.exp(by_head(sigmoid(w_npC)) * _DECAY), by_head(sigmoid(a_npC))
    k_npHd, v_npHe, removed_npHd = (by_head(x) for x in (_key(own_npC, a_npC, weights), v_npC, own_npC * weights.k_k))
    length_npH1 = torch.sqrt(tree_sum(removed_npHd * removed_npHd))
    removed_npHd = removed_npHd * (1.0 / length_npH1.clamp(min=_LEAST_LENGTH))
    out_npHe = torch.empty_like(v_npHe)
    for place, count in enumerate(stage.counts):
        at = (slice(count), place)
        state_mHed, removed_mHd = state_nHed[:count], removed_npHd[at]
        known_mHe1 = tree_sum(state_mHed * removed_mHd[:, :, None])
        state_mHed *= decay_npHd[at][:, :, None]
        state_mHed -= known_mHe1 * (removed_mHd * rate_npHd[at])[:, :, None]
        state_mHed += v_npHe[at][..., None] * k_npHd[at][:, :, None]
        if place >= stage.first:
            out_npHe[at] = tree_sum(state_mHed * r_npHd[at][:, :, None])[..., 0]
    return out_npHe
