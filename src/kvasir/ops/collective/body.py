"""The torch bodies of the collective ops."""

from __future__ import annotations

import torch
from torch import Tensor

from kvasir.parallel import Cut, Mesh, picked, side_by_side, tree_sum


def all_reduce(x_TN: Tensor, mesh: Mesh, parts: int) -> Tensor:
    return torch.from_numpy(tree_sum(mesh.meet(x_TN.numpy()), parts))


def all_gather(x_TN: Tensor, mesh: Mesh, columns: Cut) -> Tensor:
    return torch.from_numpy(side_by_side(mesh.meet(x_TN.numpy()), columns.parts))


def pick_rows(x_TD: Tensor, ids_T: Tensor, mesh: Mesh, table: Cut) -> Tensor:
    return torch.from_numpy(picked(mesh.meet(x_TD.numpy()), ids_T.numpy(), table))
