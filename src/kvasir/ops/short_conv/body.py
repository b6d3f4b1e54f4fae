"""The torch body of the gated short convolution."""

from __future__ import annotations

import torch
from torch import Tensor

from kvasir.ops.gated_delta.plan import StatePlan, WalkGroup

# letters: T token rows, D channels, K taps, n walks, p places


def short_conv(
    b_TD: Tensor,
    c_TD: Tensor,
    x_TD: Tensor,
    kernel_DK: Tensor,
    bias_D: Tensor | None,
    rows: Tensor,
    plan: StatePlan,
) -> Tensor:
    before = kernel_DK.shape[1] - 1
    rows[plan.slots // plan.block_size, plan.slots % plan.block_size + before] = b_TD * x_TD
    out_TD = torch.zeros_like(x_TD)
    for group in plan.groups:
        _walk(group, kernel_DK, rows, out_TD)
    return c_TD * (out_TD if bias_D is None else out_TD + bias_D)


def _walk(group: WalkGroup, kernel_DK: Tensor, rows: Tensor, out_TD: Tensor) -> None:
    """Computes the convolution of the group's rows, into `out_TD`."""
    before = kernel_DK.shape[1] - 1
    tail_nKD = rows[group.stages[0].blocks, :before]
    tail_nKD[group.fresh] = 0.0
    for stage in group.stages:
        rows[stage.blocks[stage.opened], :before] = tail_nKD[stage.opened]
        places = len(stage.counts)
        u_npD = rows[stage.blocks, : before + places]
        total_npD = u_npD[:, :places] * kernel_DK[:, 0]
        for tap in range(1, before + 1):
            total_npD = total_npD + u_npD[:, tap : tap + places] * kernel_DK[:, tap]
        out_TD[stage.targets] = total_npD.flatten(0, 1)[stage.results]
        tail_nKD = u_npD[:, places:]
