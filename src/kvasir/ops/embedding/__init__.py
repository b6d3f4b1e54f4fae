"""Lookup of table rows by id."""

from __future__ import annotations

import torch
from torch import Tensor

from kvasir.ops.registry import op_with


def _width(ids_T: Tensor, weight_ND: Tensor, first: int | None) -> tuple[tuple[int, ...], ...]:
    return ((weight_ND.shape[-1],),)


@op_with(_width)
def embedding(ids_T: Tensor, weight_ND: Tensor, first: int | None = None) -> Tensor:
    """Float32 [T, D]. ids: int64 [T], within the table. weight: any float dtype.

    first: if given, the weight is the part of the table that starts at this id; rows for ids outside it are zeros.
    """
    if first is None:
        return weight_ND[ids_T].float()
    here_T = (ids_T >= first) & (ids_T < first + len(weight_ND))
    return torch.where(here_T.unsqueeze(1), weight_ND[torch.where(here_T, ids_T - first, 0)].float(), 0.0)


def row(weight_ND: Tensor, index: int) -> Tensor:
    """Row `index` as float32 [D]; also for packed tables."""
    return weight_ND[index].float() if isinstance(weight_ND, Tensor) else weight_ND.row(index)
