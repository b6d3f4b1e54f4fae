"""The torch bodies of selective state spaces."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvasir.ops.gated_delta.plan import Stage, StatePlan, WalkGroup
from kvasir.ops.norm.body import rms_norm, tree_sum
from kvasir.ops.ssm import ScanSizes, ScanWeights, Taps

# letters: T token rows, C channels of the convolution, K its taps, I numbers of an input row, H heads, P channels of a
# head, G groups, r = H / G, N numbers of the state per channel, n walks, m of them at a place, p places


def causal_convolution(
    x_TC: Tensor, taps: Taps, state: Tensor, rows: Tensor, plan: StatePlan, sizes: ScanSizes
) -> Tensor:
    channels, before = taps.kernel.shape[0], taps.kernel.shape[1] - 1
    rows[plan.slots // plan.block_size, plan.slots % plan.block_size + before, :channels] = x_TC
    out_TC = torch.zeros_like(x_TC)
    for group in plan.groups:
        for stage, x_npI in _stages(group, rows, before, channels):
            out_TC[stage.targets] = _convolved(x_npI, taps).flatten(0, 1)[stage.results]
    return out_TC


def _stages(group: WalkGroup, rows: Tensor, before: int, channels: int) -> Iterator[tuple[Stage, Tensor]]:
    """Each stage with the inputs of its places [n, K - 1 + p, I], after opening its new blocks."""
    tail_nKI = rows[group.stages[0].blocks, :before]
    tail_nKI[group.fresh] = 0.0
    for stage in group.stages:
        rows[stage.blocks[stage.opened], :before, :channels] = tail_nKI[stage.opened][..., :channels]
        x_npI = rows[stage.blocks, : before + len(stage.counts)]
        yield stage, x_npI
        tail_nKI = x_npI[:, len(stage.counts) :]


def _convolved(x_npI: Tensor, taps: Taps) -> Tensor:
    """[n, p, C], from rows that begin K - 1 tokens earlier; taps are added in ascending order, then the bias."""
    channels, count = taps.kernel.shape
    places = x_npI.shape[1] - count + 1
    total_npC = x_npI[:, :places, :channels] * taps.kernel[:, 0]
    for tap in range(1, count):
        total_npC = total_npC + x_npI[:, tap : tap + places, :channels] * taps.kernel[:, tap]
    return taps.act(total_npC if taps.bias is None else total_npC + taps.bias)


def selective_scan(
    u_TC: Tensor,
    dt_TM: Tensor,
    b_TS: Tensor | None,
    c_TS: Tensor | None,
    weights: ScanWeights,
    taps: Taps,
    state: Tensor,
    rows: Tensor,
    plan: StatePlan,
    sizes: ScanSizes,
) -> Tensor:
    channels, before = taps.kernel.shape[0], taps.kernel.shape[1] - 1
    blocks, places = plan.slots // plan.block_size, plan.slots % plan.block_size + before
    rows[blocks, places, channels : channels + sizes.steps] = dt_TM
    if b_TS is not None:
        rows[blocks, places, channels + sizes.steps :] = b_TS
    out_TX = torch.zeros(u_TC.shape[0], sizes.inner, device=u_TC.device)
    for group in plan.groups:
        state_nHPN = state[group.stages[0].blocks]
        state_nHPN[group.fresh] = 0.0
        for stage, x_npI in _stages(group, rows, before, channels):
            state[stage.blocks[stage.opened]] = state_nHPN[stage.opened]
            state_nHPN = state_nHPN[: len(stage.blocks)]
            mixed_npC, rest_npM = _convolved(x_npI, taps), x_npI[:, before:, channels:]
            c_npS = None if c_TS is None else _at_places(c_TS, stage)
            out_npX = _through(stage, mixed_npC, rest_npM, c_npS, state_nHPN, weights, sizes)
            out_TX[stage.targets] = out_npX.flatten(0, 1)[stage.results]
    return out_TX


def _at_places(x_TS: Tensor, stage: Stage) -> Tensor:
    """The step's rows at the stage's places, [n, p, S]; zeros at the others."""
    found = torch.zeros(len(stage.blocks) * len(stage.counts), x_TS.shape[1], device=x_TS.device)
    found[stage.results] = x_TS[stage.targets]
    return found.unflatten(0, (len(stage.blocks), len(stage.counts)))


def _through(
    stage: Stage,
    mixed_npC: Tensor,
    rest_npM: Tensor,
    c_npS: Tensor | None,
    state_nHPN: Tensor,
    weights: ScanWeights,
    s: ScanSizes,
) -> Tensor:
    """Advances the states, in place, to the end of the stage. Returns the results [n, p, H * P]; entries before the
    first wanted place, and at places that a walk does not have, are undefined."""
    x_npHP1 = mixed_npC[..., : s.inner].unflatten(-1, (s.heads, s.width, 1))
    if c_npS is None:
        b_npS, c_npS = mixed_npC[..., s.inner :].chunk(2, -1)
    else:
        b_npS = rest_npM[..., s.steps :]
    b_npH1N, c_npH1N = (_of_heads(x, s) for x in (b_npS, c_npS))
    steps_npHP1 = _steps(rest_npM[..., : s.steps], weights, s)
    rates_HPN = weights.rates.view(s.heads, s.width if s.per_channel else 1, -1)
    skip_HP1 = weights.skip.view(s.heads, -1, 1)
    out_npHP = torch.empty_like(x_npHP1[..., 0])
    for place, count in enumerate(stage.counts):
        at = (slice(count), place)
        state_mHPN = state_nHPN[:count]
        state_mHPN *= torch.exp(-rates_HPN * steps_npHP1[at])
        state_mHPN += x_npHP1[at] * steps_npHP1[at] * b_npH1N[at]
        if place >= stage.first:
            out_npHP[at] = (tree_sum(state_mHPN * c_npH1N[at]) + skip_HP1 * x_npHP1[at])[..., 0]
    return out_npHP.flatten(2, 3)


def _of_heads(x_npS: Tensor, s: ScanSizes) -> Tensor:
    """[n, p, H, 1, N], from one row per group."""
    return x_npS.unflatten(-1, (s.groups, 1, s.dim)).repeat_interleave(s.heads // s.groups, -3)


def _steps(dt_npM: Tensor, weights: ScanWeights, s: ScanSizes) -> Tensor:
    """[n, p, H, P or 1, 1]."""
    x = dt_npM + weights.bias
    steps = torch.where(x > 20.0, x, torch.log1p(torch.exp(x))).clamp(s.low, s.high)
    return steps.unflatten(-1, (s.heads, -1, 1))


def grouped_rms_norm(x_TGd: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return rms_norm(x_TGd, weight_D.view(x_TGd.shape[1:]), eps)
