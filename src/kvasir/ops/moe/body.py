"""The torch bodies of mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kvasir.ops.linear import linear
from kvasir.ops.norm.body import tree_sum
from kvasir.parallel import ExpertShare

# letters: T token rows, E experts, k chosen experts of a row, D model width, n rows of one expert


def route(logits_TE: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    ids_Tk = logits_TE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].sort(dim=-1).values
    exps_TE = torch.exp(logits_TE - logits_TE.amax(dim=-1, keepdim=True))
    chosen_Tk = exps_TE.gather(1, ids_Tk)
    return ids_Tk, chosen_Tk / tree_sum(chosen_Tk if normalise else exps_TE)


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
