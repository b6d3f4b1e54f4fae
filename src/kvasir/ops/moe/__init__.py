"""Mixtures of experts: which experts a row goes to, and their outputs added up.

The idea: arXiv:1701.06538; in this shape: Mixtral, arXiv:2401.04088.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvasir.ops.linear import linear
from kvasir.ops.norm import tree_sum
from kvasir.ops.registry import op, op_with

# letters: T token rows, E experts, k chosen experts of a row, D model width, I an expert's inner width,
# n rows of one expert


def _chosen(logits_TE: Tensor, top_k: int, normalise: bool) -> tuple[tuple[int, ...], ...]:
    return (top_k,), (top_k,)


@op_with(_chosen)
def route(logits_TE: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """The top_k experts of each row by their logits: ids int64 [T, k], ascending, and weights float32 [T, k].

    A weight is the expert's share in the softmax over all experts, or, to normalise, over the chosen ones.
    Equal logits go to the lower id. Both sums go by the halving tree, in ascending id. logits: float32.
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
) -> Tensor:
    """Each row's sum over its experts of weight * down(act(gate(x)) * up(x)), float32 [T, D].

    x, weights: float32. ids: int64 [T, k], distinct and ascending in a row. gate, up: per expert [1, I, D];
    down: per expert [S, D, I / S], all as `linear` takes them. act: an op of `ACTIVATIONS`. The sum starts at
    zero and adds the rounded products in ascending expert id.
    """
    out_TD = torch.zeros_like(x_TD)
    for e in ids_Tk.unique().tolist():
        rows_n, places_n = torch.where(ids_Tk == e)
        x_nD = x_TD[rows_n]
        inner_nI = act(linear(x_nD, gate[e])) * linear(x_nD, up[e])
        out_TD[rows_n] += weights_Tk[rows_n, places_n].unsqueeze(1) * linear(inner_nI, down[e])
    return out_TD
