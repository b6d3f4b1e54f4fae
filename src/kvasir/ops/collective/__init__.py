"""Collective ops over ranks. Layers call them only where a rank holds just a part of a result."""

from __future__ import annotations

import torch
from torch import Tensor

from kvasir.ops.registry import op, op_with
from kvasir.parallel import Cut, Mesh, picked, side_by_side, tree_sum


@op
def all_reduce(x_TN: Tensor, mesh: Mesh, parts: int) -> Tensor:
    """Float32 [T, N], the sum of the ranks' partial sums, by a balanced tree."""
    return torch.from_numpy(tree_sum(mesh.meet(x_TN.numpy()), parts))


def _all_columns(x_TN: Tensor, mesh: Mesh, columns: Cut) -> tuple[tuple[int, ...], ...]:
    return ((columns.size,),)


@op_with(_all_columns)
def all_gather(x_TN: Tensor, mesh: Mesh, columns: Cut) -> Tensor:
    """Float32 [T, columns.size], the columns of all parts. x: this rank's columns."""
    return torch.from_numpy(side_by_side(mesh.meet(x_TN.numpy()), columns.parts))


@op
def pick_rows(x_TD: Tensor, ids_T: Tensor, mesh: Mesh, table: Cut) -> Tensor:
    """Float32 [T, D]: row i from a rank whose part of the table includes ids[i]."""
    return torch.from_numpy(picked(mesh.meet(x_TD.numpy()), ids_T.numpy(), table))
