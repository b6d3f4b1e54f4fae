"""The torch body of embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def type_rows(types_T: Tensor, weight_ND: Tensor) -> Tensor:
    return weight_ND[types_T].float()


def embedding(ids_T: Tensor, weight_ND: Tensor, first: int | None = None, or_first: bool = False) -> Tensor:
    if first is None:
        return weight_ND[ids_T].float()
    here_T = (ids_T >= first) & (ids_T < first + len(weight_ND))
    rows_TD = weight_ND[torch.where(here_T, ids_T - first, 0)].float()
    return rows_TD if or_first else torch.where(here_T.unsqueeze(1), rows_TD, 0.0)
