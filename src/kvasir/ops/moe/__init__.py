"""Mixtures of experts: routing rows to experts, and summing the experts' outputs.

The idea: arXiv:1701.06538; in this form: Mixtral, arXiv:2401.04088.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kvasir.ops.linear import linear
from kvasir.ops.norm import tree_sum
from kvasir.ops.registry import op, op_with
from kvasir.parallel import ExpertShare

# letters: T token rows, E experts, k chosen experts of a row, D model width, I an expert's inner width,
# n rows of one expert


def _chosen(logits_TE: Tensor, top_k: int, normalise: bool) -> tuple[tuple[int, ...], ...]:
    return (top_k,), (top_k,)


@op_with(_chosen)
def route(logits_TE: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """The top_k experts of each row by logit: ids int64 [T, k], ascending, and weights float32 [T, k].

    A weight is the expert's probability in the softmax over all experts or, with normalise, over the selected ones. On
    equal logits the lower id wins. Both sums use the halving tree, in ascending id. logits: float32.
    """
    ids_Tk = logits_TE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].sort(dim=-1).values
    exps_TE = torch.exp(logits_TE - logits_TE.amax(dim=-1, keepdim=True))
    chosen_Tk = exps_TE.gather(1, ids_Tk)
    return ids_Tk, chosen_Tk / tree_sum(chosen_Tk if normalise else exps_TE)


@op
def experts(
    x_TD: Tensor,
    ids_Tk: Tensor,
    weights_Tk: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    act: Callable[[Tensor], Tensor],
    share: ExpertShare | None = None,
) -> Tensor:
    """Each row's sum over its experts of weight * down(act(gate(x)) * up(x)), float32 [T, D].

    x, weights: float32. ids: int64 [T, k], distinct and ascending in a row. gate, up: per expert [1, I, D]; down: per
    expert [S, D, I / S], all as in `linear`. act: an op of `ACTIVATIONS`. The sum starts at zero and adds the rounded
    products in ascending expert id. share: how ranks split the experts or their sums; results are exchanged before they
    are weighted.
    """
    out_TD = torch.zeros_like(x_TD)

    def rows_of(rows_n: Tensor, place: int) -> Tensor:
        x_nD = x_TD[rows_n]
        return linear(act(linear(x_nD, gate[place])) * linear(x_nD, up[place]), down[place])

    computed = _shared(ids_Tk, x_TD.shape[1], rows_of, share) if share else _alone(ids_Tk, rows_of)
    for rows_n, places_n, part_nD in computed:
        out_TD[rows_n] += weights_Tk[rows_n, places_n].unsqueeze(1) * part_nD
    return out_TD


_RowsOf = Callable[[Tensor, int], Tensor]
_Computed = Iterator[tuple[Tensor, Tensor, Tensor]]  # per expert: rows, its index among each row's experts, results


def _alone(ids_Tk: Tensor, rows_of: _RowsOf) -> _Computed:
    for e in ids_Tk.unique().tolist():
        rows_n, places_n = torch.where(ids_Tk == e)
        yield rows_n, places_n, rows_of(rows_n, e)


def _shared(ids_Tk: Tensor, width: int, rows_of: _RowsOf, share: ExpertShare) -> _Computed:
    chosen = [torch.where(ids_Tk == e) for e in range(share.experts.size)]
    begins = np.cumsum([0, *(len(rows_n) for rows_n, _ in chosen)])
    rows_SD = torch.zeros(ids_Tk.numel(), width)
    first, last = share.held
    for e in range(first, last):
        if len(chosen[e][0]):
            rows_SD[begins[e] : begins[e + 1]] = rows_of(chosen[e][0], e - first)
    share.complete(rows_SD.numpy(), begins)
    for e, (rows_n, places_n) in enumerate(chosen):
        yield rows_n, places_n, rows_SD[begins[e] : begins[e + 1]]
