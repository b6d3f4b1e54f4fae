"""The torch bodies of mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kvasir.ops.activation import clamped_swiglu as _clamped
from kvasir.ops.activation.body import clamp, clamped_swiglu, sigmoid
from kvasir.ops.collective.body import complete
from kvasir.ops.linear import linear
from kvasir.ops.moe import Change
from kvasir.ops.moe.routing import Routing
from kvasir.ops.norm.body import tree_sum
from kvasir.parallel import ExpertShare

# letters: T token rows, E experts, k chosen experts of a row, D model width, n rows of one expert


def route(
    logits_TE: Tensor, routing: Routing, bias_E: Tensor | None = None, scales_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if routing.scores == "sparsemixer":
        return _mixed_sparsely(logits_TE, routing)
    if routing.scores == "softmax":
        terms_TE = torch.exp(logits_TE - logits_TE.amax(dim=-1, keepdim=True))
        total_T1 = tree_sum(terms_TE)
    else:
        total_T1 = torch.ones(len(logits_TE), 1)
        terms_TE = sigmoid(logits_TE) if routing.scores == "sigmoid" else torch.sqrt(_softplus(logits_TE))
    choice_TE = logits_TE if bias_E is None else terms_TE / total_T1 + bias_E
    if routing.top_groups < routing.groups:
        choice_TE = _within_groups(choice_TE, routing)
    ids_Tk = _first(choice_TE, routing.top_k)
    chosen_Tk = terms_TE.gather(1, ids_Tk)
    divisor_T1 = tree_sum(chosen_Tk) + total_T1 * routing.epsilon if routing.normalise else total_T1
    weights_Tk = chosen_Tk / divisor_T1 * routing.scale
    return ids_Tk, weights_Tk if scales_E is None else weights_Tk * scales_E[ids_Tk]


def _softplus(x: Tensor) -> Tensor:
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x)))


def _mixed_sparsely(logits_TE: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    first_T1 = _first(logits_TE, 1)
    left_TE = logits_TE.scatter(1, first_T1, float("-inf"))
    second_T1 = _first(left_TE, 1)
    shares = _share(logits_TE, logits_TE, first_T1, routing), _share(logits_TE, left_TE, second_T1, routing)
    ids_T2, order_T2 = torch.cat([first_T1, second_T1], 1).sort(dim=-1)
    return ids_T2, torch.cat(shares, 1).gather(1, order_T2) * routing.scale


def _share(logits_TE: Tensor, left_TE: Tensor, best_T1: Tensor, routing: Routing) -> Tensor:
    """Of the best expert, float32 [T, 1]. left: the logits, -inf for an expert that is taken."""
    greatest_T1 = left_TE.gather(1, best_T1)
    factor_TE = torch.maximum(logits_TE.abs(), greatest_T1)
    far_TE = (greatest_T1 - logits_TE) / factor_TE > 2 * routing.epsilon
    terms_TE = torch.exp(torch.where(far_TE, float("-inf"), left_TE - greatest_T1))
    return terms_TE.gather(1, best_T1) / tree_sum(terms_TE)


def _first(choice_TE: Tensor, count: int) -> Tensor:
    """The indices of the greatest values of each row, ascending; among equals, the lower index."""
    return choice_TE.sort(dim=-1, descending=True, stable=True).indices[:, :count].sort(dim=-1).values


def _within_groups(choice_TE: Tensor, routing: Routing) -> Tensor:
    """The choices, -inf outside the best groups."""
    choice_TGe = choice_TE.unflatten(1, (routing.groups, -1))
    best_TGb = choice_TGe.sort(dim=-1, descending=True).values[..., : routing.best_of_group]
    groups_Tg = _first(best_TGb.sum(dim=-1), routing.top_groups)
    kept_TG = torch.zeros(choice_TGe.shape[:2], dtype=torch.bool).scatter_(1, groups_Tg, True)
    return torch.where(kept_TG.unsqueeze(-1), choice_TGe, float("-inf")).flatten(1)


def experts(
    x_TD: Tensor,
    ids_Tk: Tensor,
    weights_Tk: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    act: Callable[..., Tensor],
    share: ExpertShare | None = None,
    biases: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]] | None = None,
    weigh_inputs: bool = False,
    change: Change | None = None,
    limit: float = 0.0,
) -> Tensor:
    out_TD = torch.zeros_like(x_TD)

    def product(x_nK: Tensor, rows_n: Tensor, part: int, place: int) -> Tensor:
        bias_N = None if biases is None else biases[part][place]
        if change is None:
            return linear(x_nK, (gate, up, down)[part][place], bias_N)
        out_nN = change(linear(x_nK, (gate, up, down)[part][place]), x_nK, rows_n, part, place)
        return out_nN if bias_N is None else out_nN + bias_N

    def rows_of(rows_n: Tensor, places_n: Tensor, place: int) -> Tensor:
        x_nD = x_TD[rows_n]
        if weigh_inputs:
            x_nD = weights_Tk[rows_n, places_n].unsqueeze(1) * x_nD
        if not up:
            return product(act(product(x_nD, rows_n, 0, place)), rows_n, 2, place)
        gate_nI, up_nI = product(x_nD, rows_n, 0, place), product(x_nD, rows_n, 1, place)
        if limit:
            inner_nI = clamp(act(gate_nI), -limit, limit) * clamp(up_nI, -limit, limit)
        else:
            inner_nI = clamped_swiglu(gate_nI, up_nI) if act is _clamped else act(gate_nI) * up_nI
        return product(inner_nI, rows_n, 2, place)

    shape = ids_Tk.numel(), x_TD.shape[1]
    computed = (
        _shared(ids_Tk, torch.zeros(shape, device=x_TD.device), rows_of, share) if share else _alone(ids_Tk, rows_of)
    )  # fmt: skip
    for rows_n, places_n, part_nD in computed:
        out_TD[rows_n] += part_nD if weigh_inputs else weights_Tk[rows_n, places_n].unsqueeze(1) * part_nD
    return out_TD


_RowsOf = Callable[[Tensor, Tensor, int], Tensor]
_Computed = Iterator[tuple[Tensor, Tensor, Tensor]]  # per expert: rows, its index among each row's experts, results


def _alone(ids_Tk: Tensor, rows_of: _RowsOf) -> _Computed:
    for e in ids_Tk.unique().tolist():
        rows_n, places_n = torch.where(ids_Tk == e)
        yield rows_n, places_n, rows_of(rows_n, places_n, e)


def _shared(ids_Tk: Tensor, rows_SD: Tensor, rows_of: _RowsOf, share: ExpertShare) -> _Computed:
    chosen = [torch.where(ids_Tk == e) for e in range(share.experts.size)]
    begins = np.cumsum([0, *(len(rows_n) for rows_n, _ in chosen)])
    first, last = share.held
    for e in range(first, last):
        rows_n, places_n = chosen[e]
        if len(rows_n):
            rows_SD[begins[e] : begins[e + 1]] = rows_of(rows_n, places_n, e - first)
    complete(rows_SD, begins.tolist(), share)
    for e, (rows_n, places_n) in enumerate(chosen):
        yield rows_n, places_n, rows_SD[begins[e] : begins[e + 1]]
